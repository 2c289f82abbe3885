/* SPDX-License-Identifier: MIT */
/*
 * Small programs with a known right answer, the same on the embedded device, on softhca
 * under Linux's mlx5_ib, and on rdma_rxe; where rdma_rxe differs, `differs` says how, and
 * why a ConnectX's answer is believed. usage: rules CASE; `rules list` prints the table.
 */
#include "common.h"

static struct pair p;

#define MELLANOX 0x02c9

static bool on_mlx5(void)
{
	struct ibv_device_attr attr;

	OK(ibv_query_device(p.ctx, &attr));
	return attr.vendor_id == MELLANOX;
}

static void open_pair(struct pair_opts o)
{
	o.type = o.type ? o.type : IBV_QPT_RC;
	pair_open(&p, o);
}

static struct op op_a(enum ibv_wr_opcode opcode, uint64_t id, uint32_t len)
{
	struct op op = op_on(&p.a, opcode, id, 0, len);

	op.remote = (uintptr_t)p.b.buf;
	op.rkey = p.b.mr->rkey;
	return op;
}

static void post_a(const struct op *op)
{
	POST_OK(&p.a, op, 1, p.o.api);
}

/* The next completion's status, and on a ConnectX its vendor error. */
static void expect_error(struct end *e, uint64_t id, unsigned allowed, unsigned vendor)
{
	struct ibv_wc wc = POLL(e->cq);

	check_status(__FILE__, __LINE__, &wc, id, allowed, e->qp->qp_num);
	if (on_mlx5())
		EQ(wc.vendor_err, vendor);
}

/* Checked by hand: mlx5 leaves the fields alone that have no meaning. */
static void expect_received(uint64_t id, uint32_t len)
{
	struct ibv_wc wc = POLL(p.b.cq);

	EQ(wc.wr_id, id);
	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(wc.opcode, IBV_WC_RECV);
	EQ(wc.byte_len, len);
}

static void t_arm_any_stays(void)
{
	unsigned pause;

	open_pair((struct pair_opts){.events = true});
	/* Before and after the device has seen the first request. */
	for (pause = 0; pause <= 20; pause += 20) {
		struct op op = op_a(IBV_WR_SEND, 1, 8);

		OK(ibv_req_notify_cq(p.b.cq, 0));
		if (pause)
			sleep_ms(pause);
		OK(ibv_req_notify_cq(p.b.cq, 1));
		post_recv(&p.b, 1, 0, 64);
		post_a(&op);
		CHECK(wait_event(p.b.ch, NULL, NULL, 5000));
		EXPECT_STATUS(&p.a, 1, IBV_WC_SUCCESS);
		expect_received(1, 8);
	}
	pair_close(&p);
}

/* Two completions, one event; the second is not read when the queue is armed again. */
static void t_arm_unread(void)
{
	struct op op;
	int i;

	open_pair((struct pair_opts){.events = true});
	OK(ibv_req_notify_cq(p.b.cq, 0));
	for (i = 0; i < 2; i++) {
		op = op_a(IBV_WR_SEND, i, 8);
		post_recv(&p.b, i, 0, 64);
		post_a(&op);
		EXPECT_STATUS(&p.a, i, IBV_WC_SUCCESS);
	}
	CHECK(wait_event(p.b.ch, NULL, NULL, 5000));
	expect_received(0, 8);
	OK(ibv_req_notify_cq(p.b.cq, 0));
	EQ(fd_readable(p.b.ch->fd, 300), on_mlx5());
	if (on_mlx5())
		CHECK(wait_event(p.b.ch, NULL, NULL, 5000));
	pair_close(&p);
}

static void t_ud_too_long(void)
{
	struct op op;

	open_pair((struct pair_opts){.type = IBV_QPT_UD});
	if (!on_mlx5() && !kernel_at_least(6, 12))
		SKIP("rdma_rxe of this kernel ends the queue pair (6.1)");
	/* 40 bytes are the header's. */
	post_recv(&p.b, 1, 0, 40 + 64);
	op = op_a(IBV_WR_SEND, 5, 65);
	post_a(&op);
	EXPECT_STATUS(&p.a, 5, IBV_WC_SUCCESS);
	poll_none(__FILE__, __LINE__, p.b.cq, 200);
	EQ(qp_state(p.b.qp), IBV_QPS_RTS);
	op = op_a(IBV_WR_SEND, 6, 64);
	post_a(&op);
	EXPECT_STATUS(&p.a, 6, IBV_WC_SUCCESS);
	expect_received(1, 40 + 64);
	pair_close(&p);
}

static void t_uc_too_long(void)
{
	struct op op;

	open_pair((struct pair_opts){.type = IBV_QPT_UC});
	post_recv(&p.b, 1, 0, 64);
	op = op_a(IBV_WR_SEND, 5, 65);
	post_a(&op);
	EXPECT_STATUS(&p.a, 5, IBV_WC_SUCCESS);
	expect_error(&p.b, 1,
		     on_mlx5() ? ONLY(IBV_WC_LOC_LEN_ERR) :
				 ~ONLY(IBV_WC_SUCCESS),
		     0xd7);
	EQ(qp_state(p.b.qp), IBV_QPS_ERR);
	pair_close(&p);
}

static void t_too_long_for_port(void)
{
	struct ibv_port_attr port;
	struct op op;

	open_pair((struct pair_opts){});
	OK(ibv_query_port(p.ctx, 1, &port));
	if (!on_mlx5())
		SKIP("rdma_rxe does not check the length");
	/* The length alone is wrong if the list is not looked at. */
	op = op_a(IBV_WR_RDMA_WRITE, 5, 64);
	op.sge[0].length = port.max_msg_sz + 1;
	post_a(&op);
	EXPECT_STATUS(&p.a, 5, IBV_WC_LOC_LEN_ERR);
	EQ(qp_state(p.a.qp), IBV_QPS_ERR);
	pair_close(&p);
}

static void t_recv_too_short(void)
{
	struct op op;

	open_pair((struct pair_opts){});
	post_recv(&p.b, 1, 0, 64);
	op = op_a(IBV_WR_SEND, 5, 65);
	post_a(&op);
	expect_error(&p.a, 5,
		     on_mlx5() ? ONLY(IBV_WC_REM_INV_REQ_ERR) :
				 ~ONLY(IBV_WC_SUCCESS),
		     0x8a);
	expect_error(&p.b, 1,
		     on_mlx5() ? ONLY(IBV_WC_LOC_LEN_ERR) :
				 ~ONLY(IBV_WC_SUCCESS),
		     0xd7);
	pair_close(&p);
}

static void t_invalidate_wrong_key(void)
{
	struct op op;

	open_pair((struct pair_opts){.timeout = 8, .retry = 1});
	post_recv(&p.b, 1, 0, 64);
	op = op_a(IBV_WR_SEND_WITH_INV, 5, 8);
	op.inv_rkey = p.b.mr->rkey ^ 0xff00;
	post_a(&op);
	EXPECT_STATUS(&p.b, 1, IBV_WC_REM_INV_REQ_ERR);
	EXPECT_STATUS(&p.a, 5,
		      on_mlx5() ? IBV_WC_RETRY_EXC_ERR : IBV_WC_SUCCESS);
	EQ(qp_state(p.b.qp), IBV_QPS_ERR);
	pair_close(&p);
}

static void t_immediate_wrong_key(void)
{
	struct op op;

	open_pair((struct pair_opts){});
	post_recv(&p.b, 1, 0, 64);
	post_recv(&p.b, 2, 0, 64);
	op = op_a(IBV_WR_RDMA_WRITE_WITH_IMM, 5, 8);
	op.rkey ^= 0xff00;
	post_a(&op);
	expect_error(&p.a, 5, ONLY(IBV_WC_REM_ACCESS_ERR), 0x88);
	expect_error(&p.b, 1,
		     ONLY(on_mlx5() ? IBV_WC_LOC_ACCESS_ERR :
				      IBV_WC_REM_ACCESS_ERR),
		     0xc2);
	expect_error(&p.b, 2, ONLY(IBV_WC_WR_FLUSH_ERR), 0xf9);
	CHECK_BYTE(p.b.buf, 64, 0xee);
	pair_close(&p);
}

static void t_bind_nothing(void)
{
	struct ibv_mw *mw;
	struct op op = {.opcode = IBV_WR_BIND_MW,
			.flags = IBV_SEND_SIGNALED,
			.wr_id = 5};

	open_pair((struct pair_opts){});
	mw = MUST(ibv_alloc_mw(p.pd, IBV_MW_TYPE_2));
	op.mw = mw;
	op.mw_rkey = ibv_inc_rkey(mw->rkey);
	op.bind = (struct ibv_mw_bind_info){
		.mr = p.a.mr,
		.addr = (uintptr_t)p.a.buf,
		.length = 0,
		.mw_access_flags = IBV_ACCESS_REMOTE_READ};
	post_a(&op);
	EXPECT_STATUS_IN(&p.a, 5,
			 on_mlx5() ? ONLY(IBV_WC_MW_BIND_ERR) :
				     ONLY(IBV_WC_MW_BIND_ERR) |
					     ONLY(IBV_WC_WR_FLUSH_ERR));
	OK(ibv_dealloc_mw(mw));
	pair_close(&p);
}

static void t_invalidate_unbound(void)
{
	struct ibv_mw *mw;
	struct op op = {.opcode = IBV_WR_LOCAL_INV,
			.flags = IBV_SEND_SIGNALED,
			.wr_id = 5};

	open_pair((struct pair_opts){});
	if (!on_mlx5())
		SKIP("the kernel of rdma_rxe crashes (6.12)");
	mw = MUST(ibv_alloc_mw(p.pd, IBV_MW_TYPE_2));
	op.inv_rkey = mw->rkey;
	post_a(&op);
	EXPECT_STATUS_IN(&p.a, 5, ~ONLY(IBV_WC_SUCCESS));
	OK(ibv_dealloc_mw(mw));
	pair_close(&p);
}

static void t_attribute_widths(void)
{
	struct ibv_qp_attr attr = {};
	struct ibv_qp_init_attr init;
	bool cut;

	open_pair((struct pair_opts){.min_rnr = 44});
	OK(ibv_query_qp(p.a.qp, &attr, IBV_QP_MIN_RNR_TIMER, &init));
	cut = on_mlx5();
	EQ(attr.min_rnr_timer, cut ? 12 : 44);
	pair_close(&p);
	if (!cut)
		return;
	open_pair((struct pair_opts){.timeout = 32 + 14, .retry = 8 + 3, .rnr_retry = 8 + 6});
	OK(ibv_query_qp(p.a.qp, &attr, IBV_QP_TIMEOUT, &init));
	EQ(attr.timeout, 14);
	EQ(attr.retry_cnt, 3);
	EQ(attr.rnr_retry, 6);
	pair_close(&p);
}

/* Milliseconds until a send without a receive fails. */
static double rnr_time(int timer, int retries)
{
	struct ibv_qp_attr attr = {.min_rnr_timer = timer};
	struct op op;
	double from;

	/* A timeout of 4 s: on rdma_rxe a shorter one ends the wait for the receiver. */
	open_pair((struct pair_opts){
		.rnr_retry = retries, .no_rnr_retry = !retries, .timeout = 20});
	/* A timer of 0 is no option of the pair. */
	OK(ibv_modify_qp(p.b.qp, &attr, IBV_QP_MIN_RNR_TIMER));
	op = op_a(IBV_WR_SEND, 5, 8);
	from = now_ms();
	post_a(&op);
	expect_error(&p.a, 5, ONLY(IBV_WC_RNR_RETRY_EXC_ERR), 0x87);
	from = now_ms() - from;
	pair_close(&p);
	return from;
}

static void t_rnr_timers(void)
{
	static const struct {
		int timer, retries;
		double least, most;
	} times[] = {
		{0, 0, 0, 300},		/* no retry: at once */
		{0, 1, 655, 2000},	/* 655.36 ms */
		{1, 3, 0, 300},		/* 0.01 ms */
		{12, 3, 1.9, 300},	/* 0.64 ms */
		{25, 2, 122, 1000},	/* 61.44 ms */
	};
	size_t i;

	for (i = 0; i < ARRAY_SIZE(times); i++) {
		double ms = rnr_time(times[i].timer, times[i].retries);

		if (ms < times[i].least || ms > times[i].most)
			FAIL("timer %d, %d retries: %.1f ms", times[i].timer,
			     times[i].retries, ms);
	}
}

static void t_failed_receive_opcode(void)
{
	struct ibv_wc wc;

	open_pair((struct pair_opts){});
	post_recv(&p.b, 1, 0, 64);
	qp_to(p.b.qp, IBV_QPS_ERR);
	memset(&wc, 0xff, sizeof(wc));
	while (ibv_poll_cq(p.b.cq, 1, &wc) == 0)
		sleep_ms(1);
	EQ(wc.status, IBV_WC_WR_FLUSH_ERR);
	/* Undefined; programs expect a receive's, or find their own value. */
	CHECK(wc.opcode & IBV_WC_RECV || !on_mlx5());
	pair_close(&p);
}

static void t_local_key_errors(void)
{
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_SEND, IBV_WR_RDMA_WRITE};
	size_t i;

	for (i = 0; i < ARRAY_SIZE(opcodes); i++) {
		struct op op;

		open_pair((struct pair_opts){});
		op = op_a(opcodes[i], 5, 8);
		op.sge[0].lkey ^= 0xff00;
		post_a(&op);
		expect_error(&p.a, 5,
			     on_mlx5() ? ONLY(IBV_WC_LOC_PROT_ERR) :
					 ~ONLY(IBV_WC_SUCCESS),
			     i ? 0x53 : 0x52);
		pair_close(&p);
	}
}

static void t_no_peer(void)
{
	struct op op;

	open_pair((struct pair_opts){.timeout = 8, .retry = 1});
	qp_to(p.b.qp, IBV_QPS_RESET);
	op = op_a(IBV_WR_RDMA_WRITE, 5, 8);
	post_a(&op);
	expect_error(&p.a, 5, ONLY(IBV_WC_RETRY_EXC_ERR), 0x81);
	pair_close(&p);
}

/* An object that the kernel does not have is neither changed nor destroyed. */
static void t_unknown_handle(void)
{
	const uint32_t other = 0xdeadbeef;
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
	struct ibv_qp_init_attr init;
	struct ibv_srq *srq;
	struct ibv_cq *cq;

	open_pair((struct pair_opts){});
	cq = ibv_create_cq(p.ctx, 1, NULL, NULL, 0);
	CHECK(cq);
	cq->handle ^= other;
	EQ(ibv_destroy_cq(cq), ENOENT);
	cq->handle ^= other;
	OK(ibv_destroy_cq(cq));

	srq = ibv_create_srq(p.pd, &(struct ibv_srq_init_attr){.attr = {1, 1, 0}});
	CHECK(srq);
	srq->handle ^= other;
	EQ(ibv_destroy_srq(srq), ENOENT);
	srq->handle ^= other;
	OK(ibv_destroy_srq(srq));

	/* Kernels differ in the errno of the first two. */
	p.a.qp->handle ^= other;
	CHECK(ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE));
	CHECK(ibv_query_qp(p.a.qp, &attr, IBV_QP_STATE, &init));
	EQ(ibv_destroy_qp(p.a.qp), ENOENT);
	p.a.qp->handle ^= other;
	OK(ibv_query_qp(p.a.qp, &attr, IBV_QP_STATE, &init));
	EQ(attr.qp_state, IBV_QPS_RTS);
	pair_close(&p);
}

static const struct rule {
	struct test_case test;
	const char *right, *differs;
} rules[] = {
	{{"arm-any-stays", t_arm_any_stays},
	 "a request for any completion is not weakened by one for solicited", NULL},
	{{"arm-unread", t_arm_unread},
	 "arming with an unread completion that no event reported raises one",
	 "rdma_rxe raises none; the card's consumer index says what was read"},
	{{"ud-too-long", t_ud_too_long},
	 "a datagram longer than the receive is dropped, the receive stays", NULL},
	{{"uc-too-long", t_uc_too_long},
	 "on UC the receive ends with LOC_LEN_ERR, the queue pair is in error",
	 "rdma_rxe has another status; the specification names this one"},
	{{"recv-too-short", t_recv_too_short},
	 "LOC_LEN_ERR at the receiver, REM_INV_REQ_ERR at the sender",
	 "rdma_rxe has other statuses; the specification names these"},
	{{"too-long-for-port", t_too_long_for_port},
	 "a message longer than max_msg_sz ends with LOC_LEN_ERR",
	 "rdma_rxe does not check the length; the specification names this status"},
	{{"invalidate-wrong-key", t_invalidate_wrong_key},
	 "the receive fails, the sender gets no response (class J): RETRY_EXC_ERR",
	 "rdma_rxe acknowledges; suites for cards expect no completion"},
	{{"immediate-wrong-key", t_immediate_wrong_key},
	 "the receive ends with LOC_ACCESS_ERR, the sender with REM_ACCESS_ERR",
	 "rdma_rxe's receive has REM_ACCESS_ERR; a card's CQE has syndrome 0x11"},
	{{"bind-nothing", t_bind_nothing},
	 "binding a window of type 2 to a length of 0 ends with MW_BIND_ERR",
	 "older rdma_rxe flushes it"},
	{{"invalidate-unbound", t_invalidate_unbound},
	 "a window of type 2 that is not bound cannot be invalidated",
	 "with rdma_rxe the kernel crashes; this is the specification's answer"},
	{{"attribute-widths", t_attribute_widths},
	 "timers and retry counts are cut to the widths of their fields",
	 "rdma_rxe keeps them; mlx5_ib is a ConnectX's driver"},
	{{"rnr-timers", t_rnr_timers},
	 "RNR timers last as table 45 says: 0 is the longest; no retry fails at once",
	 NULL},
	{{"failed-receive-opcode", t_failed_receive_opcode},
	 "a failed receive has IBV_WC_RECV or an opcode left as it was",
	 "rdma_rxe has IBV_WC_SEND; programs tell receives by the bit"},
	{{"local-key-errors", t_local_key_errors},
	 "a wrong lkey ends with LOC_PROT_ERR",
	 "rdma_rxe has another status; the specification names this one"},
	{{"no-peer", t_no_peer}, "a peer in RESET does not respond", NULL},
	{{"unknown-handle", t_unknown_handle},
	 "an object whose handle was changed is neither changed nor destroyed", NULL},
};

int main(int argc, char **argv)
{
	struct test_case cases[ARRAY_SIZE(rules)];
	size_t i;

	if (argc == 2 && !strcmp(argv[1], "list")) {
		for (i = 0; i < ARRAY_SIZE(rules); i++)
			printf("%s: %s%s%s\n", rules[i].test.name, rules[i].right,
			       rules[i].differs ? "; " : "",
			       rules[i].differs ? rules[i].differs : "");
		return 0;
	}
	for (i = 0; i < ARRAY_SIZE(rules); i++)
		cases[i] = rules[i].test;
	return test_main(argc, argv, cases, ARRAY_SIZE(cases), 60);
}

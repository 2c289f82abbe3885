/* SPDX-License-Identifier: MIT */
/*
 * Invalid requests: wrong keys and lengths complete with the right status on both
 * sides; requests that cannot be posted are refused, with the right bad_wr and
 * without a loss; full queues. usage: bad post|wr CASE
 */
#include "common.h"

static struct pair p;
static enum api api;

static void open_rc(struct pair_opts o)
{
	o.type = o.type ? o.type : IBV_QPT_RC;
	o.api = api;
	pair_open(&p, o);
}

static struct op op_a(enum ibv_wr_opcode opcode, uint64_t id, uint32_t len)
{
	struct op op = op_on(&p.a, opcode, id, 0, len);

	op.remote = (uintptr_t)p.b.buf;
	op.rkey = p.b.mr->rkey;
	return op;
}

/*
 * Posts the operation and two more: the first must fail with one of these
 * statuses, the others are flushed in order, and the queue pair enters ERR.
 */
static void expect_failure(struct op *op, unsigned allowed)
{
	struct op ops[3] = {*op, op_a(IBV_WR_RDMA_WRITE, 0xf1, 8),
			    op_a(IBV_WR_SEND, 0xf2, 8)};
	struct ibv_wc wc;

	ops[0].wr_id = 0xf0;
	ops[2].flags = 0; /* failures complete even if unsignalled */
	POST_OK(&p.a, ops, 3, api);
	wc = POLL(p.a.cq);
	check_status(__FILE__, __LINE__, &wc, 0xf0, allowed, p.a.qp->qp_num);
	/* Compared between providers on one kernel. */
	printf("status %d\n", wc.status);
	EXPECT_STATUS(&p.a, 0xf1, IBV_WC_WR_FLUSH_ERR);
	EXPECT_STATUS(&p.a, 0xf2, IBV_WC_WR_FLUSH_ERR);
	EXPECT_NO_WC(p.a.cq);
	EQ(qp_state(p.a.qp), IBV_QPS_ERR);
}

/*
 * The specification requires a protection error. On some kernels rxe reports an
 * operation error, on others it flushes the request like the following ones.
 */
#define LOCAL_ERROR                                                            \
	(ONLY(IBV_WC_LOC_PROT_ERR) | ONLY(IBV_WC_LOC_QP_OP_ERR) |              \
	 ONLY(IBV_WC_WR_FLUSH_ERR))

/* The receives are flushed in order. */
static void expect_flushed_recvs(uint64_t from, uint64_t to)
{
	for (; from <= to; from++)
		EXPECT_STATUS(&p.b, from, IBV_WC_WR_FLUSH_ERR);
}

static void t_lkey(void)
{
	struct op op;

	open_rc((struct pair_opts){});
	op = op_a(IBV_WR_SEND, 1, 64);
	op.sge[0].lkey ^= 0xff00;
	expect_failure(&op, LOCAL_ERROR);
	pair_close(&p);
}

static void t_local_range(void)
{
	struct op op;

	open_rc((struct pair_opts){});
	op = op_a(IBV_WR_RDMA_WRITE, 1, 64);
	op.sge[0].addr = (uintptr_t)p.a.buf + p.a.size - 63;
	expect_failure(&op, LOCAL_ERROR);
	pair_close(&p);
}

static void t_rkey(void)
{
	struct op op;

	open_rc((struct pair_opts){});
	post_recv(&p.b, 1, 0, 64);
	post_recv(&p.b, 2, 0, 64);
	op = op_a(IBV_WR_RDMA_WRITE, 1, 64);
	op.rkey ^= 0xff00;
	expect_failure(&op, ONLY(IBV_WC_REM_ACCESS_ERR));
	expect_flushed_recvs(1, 2);
	EQ(qp_state(p.b.qp), IBV_QPS_ERR);
	CHECK_BYTE(p.b.buf, 64, 0xee);
	pair_close(&p);
}

static void t_remote_range(void)
{
	struct op op;

	open_rc((struct pair_opts){});
	op = op_a(IBV_WR_RDMA_READ, 1, 64);
	op.remote = (uintptr_t)p.b.buf + p.b.size - 63;
	expect_failure(&op, ONLY(IBV_WC_REM_ACCESS_ERR));
	CHECK_BYTE(p.a.buf, 64, 0xee);
	pair_close(&p);
}

/* A region without remote write access. */
static void t_remote_access(void)
{
	struct ibv_mr *mr;
	struct op op;

	open_rc((struct pair_opts){});
	mr = MUST(ibv_reg_mr(p.pd, p.b.buf, 4096, IBV_ACCESS_REMOTE_READ));
	op = op_a(IBV_WR_RDMA_READ, 5, 64);
	op.rkey = mr->rkey;
	POST_OK(&p.a, &op, 1, api);
	EXPECT_WC(&p.a, 5, IBV_WC_RDMA_READ, 64);
	op = op_a(IBV_WR_RDMA_WRITE, 1, 64);
	op.rkey = mr->rkey;
	expect_failure(&op, ONLY(IBV_WC_REM_ACCESS_ERR));
	OK(ibv_dereg_mr(mr));
	pair_close(&p);
}

/* A queue pair without remote write access. */
static void t_qp_access(void)
{
	struct ibv_qp_attr attr = {.qp_access_flags = IBV_ACCESS_REMOTE_READ};
	struct op op;

	open_rc((struct pair_opts){});
	OK(ibv_modify_qp(p.b.qp, &attr, IBV_QP_ACCESS_FLAGS));
	op = op_a(IBV_WR_RDMA_WRITE, 1, 64);
	expect_failure(&op, ONLY(IBV_WC_REM_INV_REQ_ERR));
	pair_close(&p);
}

static void t_recv_lkey(void)
{
	struct ibv_sge sge;
	struct op op;

	open_rc((struct pair_opts){});
	sge = sge_on(&p.b, 0, 64);
	sge.lkey ^= 0xff00;
	OK(try_recv(&p.b, 1, &sge, 1));
	post_recv(&p.b, 2, 0, 64);
	op = op_a(IBV_WR_SEND, 1, 64);
	expect_failure(&op, ONLY(IBV_WC_REM_OP_ERR));
	EXPECT_STATUS_IN(&p.b, 1, ONLY(IBV_WC_LOC_PROT_ERR) | ONLY(IBV_WC_LOC_QP_OP_ERR));
	expect_flushed_recvs(2, 2);
	pair_close(&p);
}

static void t_recv_short(void)
{
	struct op op;

	open_rc((struct pair_opts){});
	post_recv(&p.b, 1, 0, 63);
	post_recv(&p.b, 2, 4096, 64);
	op = op_a(IBV_WR_SEND, 1, 64);
	/* The specification requires an invalid request and a local length error;
	 * rxe reports a malformed buffer, or the same status on both ends. */
	expect_failure(&op, ONLY(IBV_WC_REM_INV_REQ_ERR) | ONLY(IBV_WC_REM_OP_ERR));
	EXPECT_STATUS_IN(&p.b, 1,
			 ONLY(IBV_WC_LOC_LEN_ERR) | ONLY(IBV_WC_REM_INV_REQ_ERR) |
				 ONLY(IBV_WC_LOC_QP_OP_ERR));
	expect_flushed_recvs(2, 2);
	CHECK_BYTE(p.b.buf + 63, 64, 0xee);
	pair_close(&p);
}

static void t_rnr(void)
{
	struct op op;

	open_rc((struct pair_opts){.no_rnr_retry = true, .min_rnr = 1});
	op = op_a(IBV_WR_SEND, 1, 64);
	expect_failure(&op, ONLY(IBV_WC_RNR_RETRY_EXC_ERR));
	pair_close(&p);
}

/* The receive is posted before the retries are exceeded. */
static void t_rnr_late(void)
{
	struct op op;

	open_rc((struct pair_opts){.rnr_retry = 7, .min_rnr = 12});
	op = op_a(IBV_WR_SEND, 1, 64);
	pattern(p.a.buf, 64, 1);
	POST_OK(&p.a, &op, 1, api);
	EXPECT_NO_WC(p.a.cq);
	post_recv(&p.b, 9, 0, 64);
	EXPECT_WC(&p.a, 1, IBV_WC_SEND, 64);
	EXPECT_WC(&p.b, 9, IBV_WC_RECV, 64);
	CHECK_PATTERN(p.b.buf, 64, 1);
	pair_close(&p);
}

/* The peer does not respond. */
static void t_retry(void)
{
	struct op op;

	open_rc((struct pair_opts){.timeout = 8, .retry = 1});
	qp_to(p.b.qp, IBV_QPS_RESET);
	op = op_a(IBV_WR_RDMA_WRITE, 1, 64);
	expect_failure(&op, ONLY(IBV_WC_RETRY_EXC_ERR));
	pair_close(&p);
}

static void t_misaligned(void)
{
	struct op op;
	int posted;

	open_rc((struct pair_opts){});
	op = op_a(IBV_WR_ATOMIC_FETCH_AND_ADD, 1, 8);
	op.remote += 4;
	if (api == POST) {
		EQ(post_ops(&p.a, &op, 1, api, &posted), EINVAL);
		EQ(posted, 0);
		op.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
		EQ(post_ops(&p.a, &op, 1, api, &posted), EINVAL);
		op.remote -= 4;
		op.sge[0].length = 4; /* too short for the old value */
		EQ(post_ops(&p.a, &op, 1, api, &posted), EINVAL);
		EXPECT_NO_WC(p.a.cq);
	} else {
		expect_failure(&op, ONLY(IBV_WC_REM_INV_REQ_ERR));
	}
	CHECK_BYTE(p.b.buf, 64, 0xee);
	pair_close(&p);
}

/* A window bound with another key than the region's. */
static void t_bad_bind(void)
{
	struct ibv_mw *mw;
	struct ibv_mr fake;
	struct op op = {.opcode = IBV_WR_BIND_MW, .flags = IBV_SEND_SIGNALED};

	open_rc((struct pair_opts){});
	mw = MUST(ibv_alloc_mw(p.pd, IBV_MW_TYPE_2));
	fake = *p.a.mr;
	fake.lkey ^= 0xff00;
	op.mw = mw;
	op.mw_rkey = ibv_inc_rkey(mw->rkey);
	op.bind = (struct ibv_mw_bind_info){
		.mr = &fake,
		.addr = (uintptr_t)p.a.buf,
		.length = 64,
		.mw_access_flags = IBV_ACCESS_REMOTE_READ};
	expect_failure(&op, ONLY(IBV_WC_MW_BIND_ERR) | ONLY(IBV_WC_WR_FLUSH_ERR));
	OK(ibv_dealloc_mw(mw));
	pair_close(&p);
}

/* A key without a window cannot be invalidated. */
static void t_bad_inv(void)
{
	struct op op = {.opcode = IBV_WR_LOCAL_INV,
			.flags = IBV_SEND_SIGNALED,
			.inv_rkey = 0xfffff01};

	open_rc((struct pair_opts){});
	expect_failure(&op, LOCAL_ERROR);
	pair_close(&p);
}

/* Datagrams with the wrong Q_Key are dropped. */
static void t_qkey(void)
{
	struct ibv_qp_attr attr = {.qkey = QKEY + 1};
	struct op op;

	open_rc((struct pair_opts){.type = IBV_QPT_UD});
	post_recv(&p.b, 1, 0, 200);
	op = op_a(IBV_WR_SEND, 5, 64);
	pattern(p.a.buf, 64, 1);
	OK(ibv_modify_qp(p.b.qp, &attr, IBV_QP_QKEY));
	POST_OK(&p.a, &op, 1, api);
	EXPECT_WC(&p.a, 5, IBV_WC_SEND, 64);
	poll_none(__FILE__, __LINE__, p.b.cq, 200);
	attr.qkey = QKEY;
	OK(ibv_modify_qp(p.b.qp, &attr, IBV_QP_QKEY));
	op.wr_id = 6;
	POST_OK(&p.a, &op, 1, api);
	EXPECT_WC(&p.a, 6, IBV_WC_SEND, 64);
	struct ibv_wc wc = POLL(p.b.cq);
	check_wc(__FILE__, __LINE__, &wc, 1, IBV_WC_RECV, 104, p.b.qp->qp_num,
		 p.a.qp->qp_num, 0, 0);
	pair_close(&p);
}

/* In state ERR all posted requests are flushed in order. */
static void t_error_state(void)
{
	struct op ops[5];
	int i;

	open_rc((struct pair_opts){});
	qp_to(p.a.qp, IBV_QPS_ERR);
	for (i = 0; i < 5; i++)
		ops[i] = op_a(IBV_WR_SEND, 10 + i, 8);
	POST_OK(&p.a, ops, 5, api);
	for (i = 0; i < 5; i++)
		EXPECT_STATUS(&p.a, 10 + i, IBV_WC_WR_FLUSH_ERR);
	EXPECT_NO_WC(p.a.cq);
	pair_close(&p);
}

/* A queue pair with posted receives enters ERR, is reset and used again. */
static void t_reset_reuse(void)
{
	union ibv_gid gid;
	struct op op;
	int i, round;

	open_rc((struct pair_opts){});
	OK(ibv_query_gid(p.ctx, 1, gid_index(p.ctx), &gid));
	for (round = 0; round < 5; round++) {
		for (i = 0; i < 10; i++)
			post_recv(&p.b, 100 + i, 0, 64);
		qp_to(p.b.qp, IBV_QPS_ERR);
		expect_flushed_recvs(100, 109);
		qp_to(p.a.qp, IBV_QPS_RESET);
		qp_to(p.b.qp, IBV_QPS_RESET);
		end_connect(&p.a, &p.o, p.b.qp->qp_num, &gid);
		end_connect(&p.b, &p.o, p.a.qp->qp_num, &gid);
		for (i = 0; i < 10; i++) {
			op = op_a(IBV_WR_SEND, i, 64);
			pattern(p.a.buf, 64, i + round);
			post_recv(&p.b, 200, 0, 64);
			POST_OK(&p.a, &op, 1, api);
			EXPECT_WC(&p.a, i, IBV_WC_SEND, 64);
			EXPECT_WC(&p.b, 200, IBV_WC_RECV, 64);
			CHECK_PATTERN(p.b.buf, 64, i + round);
		}
		EXPECT_NO_WC(p.b.cq);
	}
	pair_close(&p);
}

/* A send before RTS is refused, and not sent later. */
static void t_send_unready(void)
{
	struct ibv_send_wr wr = {}, *bad = NULL;
	union ibv_gid gid;
	struct ibv_sge sge;
	struct op op;

	open_rc((struct pair_opts){.unconnected = true});
	OK(ibv_query_gid(p.ctx, 1, gid_index(p.ctx), &gid));
	sge = sge_on(&p.a, 0, 8);
	wr.wr_id = 0xbad;
	wr.sg_list = &sge;
	wr.num_sge = 1;
	wr.opcode = IBV_WR_SEND;
	wr.send_flags = IBV_SEND_SIGNALED;
	if (api == POST) {
		EQ(ibv_post_send(p.a.qp, &wr, &bad), EINVAL);
		CHECK(bad == &wr);
	} else {
		op = op_a(IBV_WR_SEND, 0xbad, 8);
		EQ(post_ops(&p.a, &op, 1, WR, NULL), EINVAL);
	}
	end_connect(&p.a, &p.o, p.b.qp->qp_num, &gid);
	end_connect(&p.b, &p.o, p.a.qp->qp_num, &gid);
	post_recv(&p.b, 1, 0, 64);
	op = op_a(IBV_WR_SEND, 1, 8);
	POST_OK(&p.a, &op, 1, api);
	EXPECT_WC(&p.a, 1, IBV_WC_SEND, 8);
	EXPECT_WC(&p.b, 1, IBV_WC_RECV, 8);
	pair_close(&p);
}

/* A receive is refused in RESET and accepted in INIT. */
static void t_recv_unready(void)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
	struct ibv_sge sge;

	open_rc((struct pair_opts){.unconnected = true});
	sge = sge_on(&p.b, 0, 8);
	EQ(try_recv(&p.b, 1, &sge, 1), EINVAL);
	OK(ibv_modify_qp(p.b.qp, &attr,
			 IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				 IBV_QP_ACCESS_FLAGS));
	OK(try_recv(&p.b, 2, &sge, 1));
	qp_to(p.b.qp, IBV_QPS_ERR);
	EXPECT_STATUS(&p.b, 2, IBV_WC_WR_FLUSH_ERR);
	EXPECT_NO_WC(p.b.cq);
	pair_close(&p);
}

/*
 * A request in the middle of a list is refused: the ones before it are posted,
 * bad_wr is the refused one, and the ones after it are not posted.
 */
static void check_refused_in_list(struct op *bad, int want)
{
	struct op ops[5];
	int i, posted = -1, rc;

	for (i = 0; i < 5; i++)
		ops[i] = op_a(IBV_WR_RDMA_WRITE, 30 + i, 8 + i);
	bad->wr_id = 32;
	ops[2] = *bad;
	rc = post_ops(&p.a, ops, 5, api, &posted);
	if (api == POST) {
		EQ(rc, want);
		EQ(posted, 2);
	} else {
		/* The whole batch is discarded. */
		if (rc != want && rc != ENOSPC && rc != ENOMEM)
			FAIL("ibv_wr_complete returned %d", rc);
	}
	for (i = 0; i < posted; i++)
		EXPECT_WC(&p.a, 30 + i, IBV_WC_RDMA_WRITE, 8 + i);
	EXPECT_NO_WC(p.a.cq);
	/* The rest can be posted now. */
	POST_OK(&p.a, ops + 3, 2, api);
	for (i = 3; i < 5; i++)
		EXPECT_WC(&p.a, 30 + i, IBV_WC_RDMA_WRITE, 8 + i);
	EXPECT_NO_WC(p.a.cq);
}

static void t_too_many_sge(void)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct ibv_sge rsge[33];
	struct op op;
	int i;

	open_rc((struct pair_opts){.sge = 3});
	OK(ibv_query_qp(p.a.qp, &attr, IBV_QP_CAP, &init));
	CHECK(init.cap.max_send_sge >= 3 && init.cap.max_send_sge < 32);
	op = op_a(IBV_WR_SEND, 1, 1);
	op.list = true;
	op.nsge = init.cap.max_send_sge + 1;
	for (i = 0; i < op.nsge; i++)
		op.sge[i] = sge_on(&p.a, i, 1);
	check_refused_in_list(&op, EINVAL);
	for (i = 0; i < 33; i++)
		rsge[i] = sge_on(&p.b, i, 1);
	EQ(try_recv(&p.b, 1, rsge, init.cap.max_recv_sge + 1), EINVAL);
	EQ(try_recv(&p.b, 1, rsge, 33), EINVAL);
	pair_close(&p);
}

static void t_inline_big(void)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct op op;

	open_rc((struct pair_opts){.inl = 100});
	OK(ibv_query_qp(p.a.qp, &attr, IBV_QP_CAP, &init));
	CHECK(init.cap.max_inline_data >= 100);
	op = op_a(IBV_WR_SEND, 1, init.cap.max_inline_data + 1);
	op.flags |= IBV_SEND_INLINE;
	check_refused_in_list(&op, EINVAL);
	op = op_a(IBV_WR_RDMA_WRITE, 50, init.cap.max_inline_data);
	op.flags |= IBV_SEND_INLINE;
	pattern(p.a.buf, init.cap.max_inline_data, 5);
	POST_OK(&p.a, &op, 1, api);
	EXPECT_WC(&p.a, 50, IBV_WC_RDMA_WRITE, init.cap.max_inline_data);
	CHECK_PATTERN(p.b.buf, init.cap.max_inline_data, 5);
	pair_close(&p);
}

/*
 * The send queue is filled while the receiver is not ready: it accepts exactly its
 * capacity and refuses the next request with ENOMEM; the posted ones complete in
 * order when receives are posted, and the queue accepts requests again.
 */
static void t_full_send(void)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct op ops[64];
	int i, posted, cap, rc, round;

	open_rc((struct pair_opts){.wr = 20, .min_rnr = 14});
	OK(ibv_query_qp(p.a.qp, &attr, IBV_QP_CAP, &init));
	cap = init.cap.max_send_wr;
	CHECK(cap >= 20 && cap < 60);
	for (round = 0; round < 3; round++) {
		for (i = 0; i < cap + 3; i++)
			ops[i] = op_a(IBV_WR_SEND, i, 1 + i);
		if (api == WR) {
			/* A batch is all or nothing. */
			rc = post_ops(&p.a, ops, cap + 1, api, NULL);
			if (rc != ENOSPC && rc != ENOMEM)
				FAIL("a batch above the capacity returned %d", rc);
			POST_OK(&p.a, ops, cap, api);
			posted = cap;
		} else {
			EQ(post_ops(&p.a, ops, cap + 3, api, &posted), ENOMEM);
			EQ(posted, cap);
		}
		EXPECT_NO_WC(p.a.cq);
		/* The queue is still full. */
		rc = post_ops(&p.a, ops, 1, api, NULL);
		if (api == POST)
			EQ(rc, ENOMEM);
		else if (rc != ENOSPC && rc != ENOMEM)
			FAIL("a full queue returned %d", rc);
		for (i = 0; i < cap; i++) {
			post_recv(&p.b, 100 + i, 0, 64);
			EXPECT_WC(&p.a, i, IBV_WC_SEND, 1 + i);
			EXPECT_WC(&p.b, 100 + i, IBV_WC_RECV, 1 + i);
		}
		EXPECT_NO_WC(p.a.cq);
		EXPECT_NO_WC(p.b.cq);
	}
	pair_close(&p);
}

static void t_full_recv(void)
{
	struct ibv_recv_wr wr[64] = {}, *bad;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct ibv_sge sge;
	int i, cap;

	open_rc((struct pair_opts){.wr = 20});
	OK(ibv_query_qp(p.b.qp, &attr, IBV_QP_CAP, &init));
	cap = init.cap.max_recv_wr;
	CHECK(cap >= 20 && cap < 60);
	sge = sge_on(&p.b, 0, 64);
	for (i = 0; i < cap + 3; i++) {
		wr[i].wr_id = i;
		wr[i].sg_list = &sge;
		wr[i].num_sge = 1;
		wr[i].next = i < cap + 2 ? &wr[i + 1] : NULL;
	}
	bad = NULL;
	EQ(ibv_post_recv(p.b.qp, wr, &bad), ENOMEM);
	EQ(bad - wr, cap);
	for (i = 0; i < cap; i++) {
		struct op op = op_a(IBV_WR_SEND, i, 8);

		POST_OK(&p.a, &op, 1, api);
		EXPECT_WC(&p.a, i, IBV_WC_SEND, 8);
		EXPECT_WC(&p.b, i, IBV_WC_RECV, 8);
	}
	EXPECT_NO_WC(p.b.cq);
	wr[cap - 1].next = NULL;
	OK(ibv_post_recv(p.b.qp, wr, &bad));
	qp_to(p.b.qp, IBV_QPS_ERR);
	expect_flushed_recvs(0, cap - 1);
	pair_close(&p);
}

static void t_full_srq(void)
{
	struct ibv_recv_wr wr[64] = {}, *bad;
	struct ibv_srq_attr attr;
	struct ibv_sge sge;
	int i, cap;

	open_rc((struct pair_opts){.wr = 20, .srq = true});
	OK(ibv_query_srq(p.b.srq, &attr));
	cap = attr.max_wr;
	CHECK(cap >= 20 && cap < 60);
	sge = sge_on(&p.b, 0, 64);
	for (i = 0; i < cap + 3; i++) {
		wr[i].wr_id = i;
		wr[i].sg_list = &sge;
		wr[i].num_sge = 1;
		wr[i].next = i < cap + 2 ? &wr[i + 1] : NULL;
	}
	bad = NULL;
	EQ(ibv_post_srq_recv(p.b.srq, wr, &bad), ENOMEM);
	EQ(bad - wr, cap);
	for (i = 0; i < cap; i++) {
		struct op op = op_a(IBV_WR_SEND, i, 8);

		POST_OK(&p.a, &op, 1, api);
		EXPECT_WC(&p.a, i, IBV_WC_SEND, 8);
		EXPECT_WC(&p.b, i, IBV_WC_RECV, 8);
	}
	EXPECT_NO_WC(p.b.cq);
	pair_close(&p);
}

/*
 * More completions than entries: the first ones are read, valid and in order, and
 * the overrun is reported by an event of the queue.
 */
static void t_cq_overrun(void)
{
	struct ibv_async_event ev;
	struct op ops[40];
	struct ibv_wc wc;
	int i, cap, got = 0;
	bool err = false;

	open_rc((struct pair_opts){.cqe = 7});
	cap = p.a.cq->cqe;
	CHECK(cap >= 7 && cap < 30);
	for (i = 0; i < 40; i++)
		ops[i] = op_a(IBV_WR_RDMA_WRITE, 500 + i, 1 + i);
	POST_OK(&p.a, ops, 40, api);
	/* There may be an event for each lost completion. */
	while (wait_async(p.ctx, &ev, err ? 300 : 5000)) {
		EQ(ev.event_type, IBV_EVENT_CQ_ERR);
		CHECK(ev.element.cq == p.a.cq);
		ibv_ack_async_event(&ev);
		err = true;
	}
	CHECK(err);
	while (poll_wait(p.a.cq, &wc, 50)) {
		check_wc(__FILE__, __LINE__, &wc, 500 + got, IBV_WC_RDMA_WRITE,
			 1 + got, p.a.qp->qp_num, 0, 0, 0);
		got++;
	}
	EQ(got, cap);
	pair_close(&p);
}

static const struct test_case cases[] = {
	{"lkey", t_lkey},
	{"local-range", t_local_range},
	{"rkey", t_rkey},
	{"remote-range", t_remote_range},
	{"remote-access", t_remote_access},
	{"qp-access", t_qp_access},
	{"recv-lkey", t_recv_lkey},
	{"recv-short", t_recv_short},
	{"rnr", t_rnr},
	{"rnr-late", t_rnr_late},
	{"retry", t_retry},
	{"misaligned", t_misaligned},
	{"bad-bind", t_bad_bind},
	{"bad-inv", t_bad_inv},
	{"qkey", t_qkey},
	{"error-state", t_error_state},
	{"reset-reuse", t_reset_reuse},
	{"send-unready", t_send_unready},
	{"recv-unready", t_recv_unready},
	{"too-many-sge", t_too_many_sge},
	{"inline-big", t_inline_big},
	{"full-send", t_full_send},
	{"full-recv", t_full_recv},
	{"full-srq", t_full_srq},
	{"cq-overrun", t_cq_overrun},
};

int main(int argc, char **argv)
{
	if (argc < 3)
		return test_main(1, argv, cases, ARRAY_SIZE(cases), 60);
	api = !strcmp(argv[1], "wr") ? WR : POST;
	argv[1] = argv[0];
	return test_main(argc - 1, argv + 1, cases, ARRAY_SIZE(cases), 60);
}

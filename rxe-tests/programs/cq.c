/* SPDX-License-Identifier: MIT */
/*
 * Completion queues: the extended cursor, sizes, resizing, and completion and
 * asynchronous events.
 */
#include "common.h"

static struct pair p;

static void send_range(uint64_t from, uint64_t to)
{
	for (; from <= to; from++) {
		struct op op = op_on(&p.a, IBV_WR_SEND_WITH_IMM, from, 0,
				     from % 60 + 1);

		op.imm = htonl(from);
		post_recv(&p.b, from, 0, 64);
		POST_OK(&p.a, &op, 1, p.o.api);
	}
}

/* The completions of send_range, in order. */
static void expect_range(struct ibv_cq *cq, uint64_t from, uint64_t to)
{
	for (; from <= to; from++) {
		struct ibv_wc wc = POLL(cq);
		uint32_t len = from % 60 + 1;

		if (cq == p.b.cq)
			check_wc(__FILE__, __LINE__, &wc, from, IBV_WC_RECV, len,
				 p.b.qp->qp_num, 0, IBV_WC_WITH_IMM,
				 htonl(from));
		else
			check_wc(__FILE__, __LINE__, &wc, from, IBV_WC_SEND, len,
				 p.a.qp->qp_num, 0, IBV_WC_WITH_IMM, 0);
	}
}

/* Waits until the kernel has written all entries. */
static void wait_for_entries(void)
{
	sleep_ms(150);
}

/* --- the extended cursor --- */

#define RXE_WC_FLAGS                                                           \
	(IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM | \
	 IBV_WC_EX_WITH_SRC_QP | IBV_WC_EX_WITH_SLID | IBV_WC_EX_WITH_SL |     \
	 IBV_WC_EX_WITH_DLID_PATH_BITS)

static int start_poll(struct ibv_cq_ex *cq)
{
	struct ibv_poll_cq_attr attr = {};
	double end = now_ms() + 5000;
	int rc;

	while ((rc = ibv_start_poll(cq, &attr)) == ENOENT && now_ms() < end)
		sleep_ms(1);
	return rc;
}

static void expect_sent_imm(uint64_t id, uint32_t len)
{
	struct ibv_wc wc = POLL(p.a.cq);

	check_wc(__FILE__, __LINE__, &wc, id, IBV_WC_SEND, len,
		 p.a.qp->qp_num, 0, IBV_WC_WITH_IMM, 0);
}

static void ex_fields(struct ibv_cq_init_attr_ex attr, enum ibv_qp_type type)
{
	struct ibv_cq_ex *cqx;
	struct ibv_qp *old;
	union ibv_gid gid;
	uint32_t len = 33, head = type == IBV_QPT_UD ? 40 : 0;
	uint64_t id;
	int n = 0;

	pair_open(&p, (struct pair_opts){.type = type});
	attr.cqe = 100;
	attr.wc_flags = RXE_WC_FLAGS;
	attr.cq_context = &p;
	cqx = MUST(ibv_create_cq_ex(p.ctx, &attr));
	CHECK(cqx->cqe >= 100);
	CHECK(cqx->cq_context == &p && cqx->context == p.ctx);
	CHECK((void *)ibv_cq_ex_to_cq(cqx) == (void *)cqx);
	/* The receiver's queue pair uses this queue. */
	old = p.b.qp;
	struct ibv_qp_init_attr init = {
		.send_cq = ibv_cq_ex_to_cq(cqx),
		.recv_cq = ibv_cq_ex_to_cq(cqx),
		.cap = {64, 64, 4, 4, 0},
		.qp_type = type,
	};
	if (p.b.ah)
		OK(ibv_destroy_ah(p.b.ah));
	p.b.qp = MUST(ibv_create_qp(p.pd, &init));
	OK(ibv_destroy_qp(old));
	OK(ibv_query_gid(p.ctx, 1, gid_index(p.ctx), &gid));
	end_connect(&p.b, &p.o, p.a.qp->qp_num, &gid);
	qp_to(p.a.qp, IBV_QPS_RESET);
	if (p.a.ah)
		OK(ibv_destroy_ah(p.a.ah));
	p.a.ah = NULL;
	end_connect(&p.a, &p.o, p.b.qp->qp_num, &gid);

	EQ(ibv_start_poll(cqx, &(struct ibv_poll_cq_attr){}), ENOENT);
	for (id = 1; id <= 30; id++) {
		struct op op = op_on(&p.a, IBV_WR_SEND_WITH_IMM, id, 0, len);

		op.imm = htonl(id);
		post_recv(&p.b, id, 0, 100);
		POST_OK(&p.a, &op, 1, POST);
		expect_sent_imm(id, len);
	}
	wait_for_entries();
	/* One batch reads all of them. */
	OK(start_poll(cqx));
	for (id = 1;; id++) {
		int rc;

		EQ(cqx->wr_id, id);
		EQ(cqx->status, IBV_WC_SUCCESS);
		EQ(ibv_wc_read_opcode(cqx), IBV_WC_RECV);
		EQ(ibv_wc_read_vendor_err(cqx), 0);
		EQ(ibv_wc_read_byte_len(cqx), len + head);
		EQ(ibv_wc_read_imm_data(cqx), htonl(id));
		EQ(ibv_wc_read_qp_num(cqx), p.b.qp->qp_num);
		EQ(ibv_wc_read_src_qp(cqx),
		   type == IBV_QPT_UD ? p.a.qp->qp_num : 0);
		EQ(ibv_wc_read_wc_flags(cqx) & ~IBV_WC_GRH, IBV_WC_WITH_IMM);
		EQ(ibv_wc_read_slid(cqx), 0);
		EQ(ibv_wc_read_sl(cqx), 0);
		EQ(ibv_wc_read_dlid_path_bits(cqx), 0);
		n++;
		if (id == 30)
			break;
		rc = ibv_next_poll(cqx);
		OK(rc);
	}
	/* The batch ends before an ENOENT. */
	ibv_end_poll(cqx);
	EQ(n, 30);
	EQ(ibv_start_poll(cqx, &(struct ibv_poll_cq_attr){}), ENOENT);

	/* Both interfaces of one queue, alternately. */
	for (id = 31; id <= 40; id++) {
		struct op op = op_on(&p.a, IBV_WR_SEND_WITH_IMM, id, 0, len);

		op.imm = htonl(id);
		post_recv(&p.b, id, 0, 100);
		POST_OK(&p.a, &op, 1, POST);
		expect_sent_imm(id, len);
		if (id % 2) {
			OK(start_poll(cqx));
			EQ(cqx->wr_id, id);
			ibv_end_poll(cqx);
		} else {
			struct ibv_wc wc = POLL(ibv_cq_ex_to_cq(cqx));

			check_wc(__FILE__, __LINE__, &wc, id, IBV_WC_RECV,
				 len + head, p.b.qp->qp_num,
				 type == IBV_QPT_UD ? p.a.qp->qp_num : 0,
				 IBV_WC_WITH_IMM, htonl(id));
		}
	}
	EXPECT_NO_WC(ibv_cq_ex_to_cq(cqx));
	old = p.b.qp;
	p.b.qp = MUST(ibv_create_qp(p.pd, &(struct ibv_qp_init_attr){
						  .send_cq = p.b.cq,
						  .recv_cq = p.b.cq,
						  .cap = {1, 1, 1, 1, 0},
						  .qp_type = type}));
	OK(ibv_destroy_qp(old));
	OK(ibv_destroy_cq(ibv_cq_ex_to_cq(cqx)));
	pair_close(&p);
}

static void t_ex_fields(void)
{
	ex_fields((struct ibv_cq_init_attr_ex){}, IBV_QPT_RC);
}

static void t_ex_fields_ud(void)
{
	ex_fields((struct ibv_cq_init_attr_ex){}, IBV_QPT_UD);
}

/* A single-threaded queue behaves the same. */
static void t_single_threaded(void)
{
	ex_fields((struct ibv_cq_init_attr_ex){
			  .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
			  .flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED},
		  IBV_QPT_RC);
}

/* A failed operation read through the cursor. */
static void t_ex_error(void)
{
	struct op op;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .cq_ex = true});
	op = op_on(&p.a, IBV_WR_RDMA_WRITE, 77, 0, 8);
	op.remote = (uintptr_t)p.b.buf;
	op.rkey = p.b.mr->rkey ^ 0xff00;
	POST_OK(&p.a, &op, 1, POST);
	OK(start_poll(p.a.cqx));
	EQ(p.a.cqx->wr_id, 77);
	EQ(p.a.cqx->status, IBV_WC_REM_ACCESS_ERR);
	EQ(ibv_wc_read_qp_num(p.a.cqx), p.a.qp->qp_num);
	(void)ibv_wc_read_vendor_err(p.a.cqx);
	ibv_end_poll(p.a.cqx);
	pair_close(&p);
}

/* Fields that rxe does not have are refused with EOPNOTSUPP, without a leak. */
static void t_ex_refused(void)
{
	static const uint64_t flags[] = {
		IBV_WC_EX_WITH_COMPLETION_TIMESTAMP, IBV_WC_EX_WITH_CVLAN,
		IBV_WC_EX_WITH_FLOW_TAG, IBV_WC_EX_WITH_TM_INFO,
		IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK, 1ULL << 40};
	struct ibv_context *ctx = open_device();
	struct ibv_cq_init_attr_ex attr = {.cqe = 10};
	unsigned maps = count_maps("");
	size_t i;

	for (i = 0; i < ARRAY_SIZE(flags); i++) {
		attr.wc_flags = flags[i] | IBV_WC_EX_WITH_BYTE_LEN;
		NULL_WITH(ibv_create_cq_ex(ctx, &attr), EOPNOTSUPP);
	}
	attr.wc_flags = 0;
	attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
	attr.flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
	NULL_WITH(ibv_create_cq_ex(ctx, &attr), EOPNOTSUPP);
	EQ(count_maps(""), maps);
	OK(ibv_close_device(ctx));
}

static void t_sizes(void)
{
	static const int size[] = {1, 2, 3, 4, 7, 8, 63, 64, 1000, 32767};
	struct ibv_context *ctx = open_device();
	struct ibv_device_attr dev;
	struct ibv_cq *cq;
	struct ibv_wc wc;
	size_t i;

	OK(ibv_query_device(ctx, &dev));
	for (i = 0; i < ARRAY_SIZE(size); i++) {
		cq = MUST(ibv_create_cq(ctx, size[i], NULL, NULL, 0));
		CHECK(cq->cqe >= size[i]);
		EQ(ibv_poll_cq(cq, 1, &wc), 0);
		EQ(ibv_poll_cq(cq, 0, &wc), 0);
		OK(ibv_destroy_cq(cq));
	}
	NULL_WITH(ibv_create_cq(ctx, 0, NULL, NULL, 0), EINVAL);
	NULL_WITH(ibv_create_cq(ctx, -1, NULL, NULL, 0), EINVAL);
	NULL_WITH(ibv_create_cq(ctx, dev.max_cqe + 1, NULL, NULL, 0), EINVAL);
	NULL_WITH(ibv_create_cq(ctx, 10, NULL, NULL, ctx->num_comp_vectors),
		  EINVAL);
	NULL_WITH(ibv_create_cq(ctx, 10, NULL, NULL, -1), EINVAL);
	OK(ibv_close_device(ctx));
}

/* Polling with any batch size returns each entry once, in order. */
static void t_poll_batches(void)
{
	static const int batch[] = {1, 2, 3, 16, 100};
	struct ibv_wc wc[100];
	uint64_t base = 0;
	size_t i;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .cqe = 63});
	for (i = 0; i < 40; i++) {
		int want = batch[i % ARRAY_SIZE(batch)], n, j;
		uint64_t next = base + 1;

		send_range(base + 1, base + 50);
		expect_range(p.a.cq, base + 1, base + 50);
		wait_for_entries();
		EQ(ibv_poll_cq(p.b.cq, 0, wc), 0);
		while (next <= base + 50) {
			int left = base + 51 - next;

			n = ibv_poll_cq(p.b.cq, want, wc);
			EQ(n, want < left ? want : left);
			for (j = 0; j < n; j++, next++) {
				EQ(wc[j].wr_id, next);
				EQ(wc[j].byte_len, next % 60 + 1);
			}
		}
		EQ(ibv_poll_cq(p.b.cq, want, wc), 0);
		base += 50;
	}
	pair_close(&p);
}

/* --- resizing --- */

/* Unread entries are kept, in order, when the queue grows and shrinks. */
static void t_resize(void)
{
	static const int size[] = {500, 70, 64, 1000, 60, 3000};
	uint64_t base = 0;
	size_t i, start;

	pair_open(&p, (struct pair_opts){
			      .type = IBV_QPT_RC, .wr = 64, .cqe = 63});
	/* With different indices of the queue. */
	for (start = 0; start < 5; start++) {
		send_range(base + 1, base + 13);
		expect_range(p.a.cq, base + 1, base + 13);
		expect_range(p.b.cq, base + 1, base + 13);
		base += 13;
		for (i = 0; i < ARRAY_SIZE(size); i++) {
			send_range(base + 1, base + 50);
			expect_range(p.a.cq, base + 1, base + 50);
			wait_for_entries();
			expect_range(p.b.cq, base + 1, base + 20);
			OK(ibv_resize_cq(p.b.cq, size[i]));
			CHECK(p.b.cq->cqe >= size[i]);
			expect_range(p.b.cq, base + 21, base + 30);
			send_range(base + 51, base + 60);
			expect_range(p.a.cq, base + 51, base + 60);
			expect_range(p.b.cq, base + 31, base + 60);
			EXPECT_NO_WC(p.b.cq);
			base += 60;
		}
	}
	pair_close(&p);
}

/* Resizing between batches of the extended cursor. */
static void t_resize_ex(void)
{
	uint64_t id;

	pair_open(&p, (struct pair_opts){
			      .type = IBV_QPT_RC, .cqe = 63, .cq_ex = true});
	send_range(1, 40);
	expect_range(p.a.cq, 1, 40);
	wait_for_entries();
	OK(start_poll(p.b.cqx));
	EQ(p.b.cqx->wr_id, 1);
	ibv_end_poll(p.b.cqx);
	OK(ibv_resize_cq(p.b.cq, 200));
	CHECK(p.b.cqx->cqe >= 200);
	OK(start_poll(p.b.cqx));
	for (id = 2;; id++) {
		int rc;

		EQ(p.b.cqx->wr_id, id);
		EQ(ibv_wc_read_byte_len(p.b.cqx), id % 60 + 1);
		rc = ibv_next_poll(p.b.cqx);
		if (rc) {
			EQ(rc, ENOENT);
			break;
		}
	}
	ibv_end_poll(p.b.cqx);
	EQ(id, 40);
	pair_close(&p);
}

static volatile int stop;
static volatile uint64_t polled_count;

static void *poller(void *arg)
{
	uint64_t next = 1;

	(void)arg;
	while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE) || next <= 3000) {
		struct ibv_wc wc[8];
		int n = ibv_poll_cq(p.b.cq, 8, wc), i;

		CHECK(n >= 0);
		for (i = 0; i < n; i++, next++) {
			EQ(wc[i].wr_id, next);
			EQ(wc[i].status, IBV_WC_SUCCESS);
			EQ(wc[i].byte_len, next % 60 + 1);
		}
		__atomic_store_n(&polled_count, next - 1, __ATOMIC_RELEASE);
		if (!n)
			sched_yield();
	}
	EQ(next, 3001);
	return NULL;
}

/* One thread polls, one resizes, and one sends. */
static void *resizer(void *arg)
{
	int round = 0;

	(void)arg;
	while (!__atomic_load_n(&stop, __ATOMIC_ACQUIRE)) {
		int rc = ibv_resize_cq(p.b.cq, round++ % 2 ? 200 : 2000);

		OK(rc);
		sleep_ms(2);
	}
	CHECK(round > 10);
	return NULL;
}

static void t_resize_race(void)
{
	pthread_t a, b;
	uint64_t base;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .cqe = 200});
	OK(pthread_create(&a, NULL, poller, NULL));
	OK(pthread_create(&b, NULL, resizer, NULL));
	for (base = 0; base < 3000; base += 30) {
		send_range(base + 1, base + 30);
		expect_range(p.a.cq, base + 1, base + 30);
		/* At most as many entries as the smaller size holds. */
		while (__atomic_load_n(&polled_count, __ATOMIC_ACQUIRE) + 100 < base)
			sched_yield();
	}
	__atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
	OK(pthread_join(b, NULL));
	OK(pthread_join(a, NULL));
	pair_close(&p);
}

/* --- events --- */

static void open_events(struct pair_opts o)
{
	o.type = IBV_QPT_RC;
	o.events = true;
	pair_open(&p, o);
}

/* One event per request notification, with the right queue and context. */
static void t_notify(void)
{
	struct ibv_cq *cq;
	void *context;
	uint64_t i;

	open_events((struct pair_opts){});
	CHECK(p.b.cq->channel == p.b.ch && p.b.cq->cq_context == &p.b);
	send_range(1, 1); /* not armed: no event */
	expect_range(p.a.cq, 1, 1);
	expect_range(p.b.cq, 1, 1);
	CHECK(!fd_readable(p.b.ch->fd, 50));
	for (i = 2; i < 20; i += 2) {
		OK(ibv_req_notify_cq(p.b.cq, 0));
		CHECK(!fd_readable(p.b.ch->fd, 5));
		send_range(i, i + 1);
		CHECK(wait_event(p.b.ch, &cq, &context, 5000));
		CHECK(cq == p.b.cq && context == &p.b);
		expect_range(p.a.cq, i, i + 1);
		expect_range(p.b.cq, i, i + 1);
		CHECK(!fd_readable(p.b.ch->fd, 20)); /* armed once, one event */
	}
	pair_close(&p);
}

/* Notification for solicited completions only. */
static void t_solicited(void)
{
	struct op op;
	enum api api;

	for (api = POST; api <= WR; api++) {
		open_events((struct pair_opts){.api = api});
		OK(ibv_req_notify_cq(p.b.cq, 1));
		op = op_on(&p.a, IBV_WR_SEND, 1, 0, 8);
		post_recv(&p.b, 1, 0, 64);
		POST_OK(&p.a, &op, 1, api);
		EXPECT_WC(&p.a, 1, IBV_WC_SEND, 8);
		CHECK(!fd_readable(p.b.ch->fd, 100));
		op.flags |= IBV_SEND_SOLICITED;
		op.wr_id = 2;
		post_recv(&p.b, 2, 0, 64);
		POST_OK(&p.a, &op, 1, api);
		CHECK(wait_event(p.b.ch, NULL, NULL, 5000));
		EXPECT_WC(&p.a, 2, IBV_WC_SEND, 8);
		EXPECT_WC(&p.b, 1, IBV_WC_RECV, 8);
		EXPECT_WC(&p.b, 2, IBV_WC_RECV, 8);
		/* A write with immediate data may be solicited, too. */
		OK(ibv_req_notify_cq(p.b.cq, 1));
		op = op_on(&p.a, IBV_WR_RDMA_WRITE_WITH_IMM, 3, 0, 8);
		op.remote = (uintptr_t)p.b.buf;
		op.rkey = p.b.mr->rkey;
		op.flags |= IBV_SEND_SOLICITED;
		post_recv(&p.b, 3, 0, 64);
		POST_OK(&p.a, &op, 1, api);
		CHECK(wait_event(p.b.ch, NULL, NULL, 5000));
		pair_close(&p);
	}
}

/* Two queues on one channel: each event names its queue. */
static void t_shared_channel(void)
{
	struct ibv_comp_channel *ch;
	struct ibv_cq *cq[2], *got;
	struct ibv_qp *qp[2];
	void *context;
	int i, round;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC});
	ch = MUST(ibv_create_comp_channel(p.ctx));
	for (i = 0; i < 2; i++) {
		struct ibv_qp_init_attr init = {
			.cap = {16, 16, 1, 1, 0}, .qp_type = IBV_QPT_RC};

		cq[i] = MUST(ibv_create_cq(p.ctx, 16, &cq[i], ch, 0));
		init.send_cq = init.recv_cq = cq[i];
		qp[i] = MUST(ibv_create_qp(p.pd, &init));
	}
	for (round = 0; round < 10; round++) {
		struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT,
					   .port_num = 1};
		struct ibv_recv_wr wr = {.wr_id = 5}, *bad;

		i = round % 2;
		OK(ibv_modify_qp(qp[i], &attr,
				 IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					 IBV_QP_ACCESS_FLAGS));
		OK(ibv_post_recv(qp[i], &wr, &bad));
		OK(ibv_req_notify_cq(cq[0], 0));
		OK(ibv_req_notify_cq(cq[1], 0));
		qp_to(qp[i], IBV_QPS_ERR); /* the flush causes the event */
		CHECK(wait_event(ch, &got, &context, 5000));
		CHECK(got == cq[i] && context == &cq[i]);
		CHECK(!fd_readable(ch->fd, 20));
		struct ibv_wc wc = POLL(cq[i]);
		check_status(__FILE__, __LINE__, &wc, 5,
			     ONLY(IBV_WC_WR_FLUSH_ERR),
			     qp[i]->qp_num);
		EXPECT_NO_WC(cq[!i]);
		qp_to(qp[i], IBV_QPS_RESET);
	}
	EQ(ibv_destroy_comp_channel(ch), EBUSY);
	for (i = 0; i < 2; i++) {
		OK(ibv_destroy_qp(qp[i]));
		OK(ibv_destroy_cq(cq[i]));
	}
	OK(ibv_destroy_comp_channel(ch));
	pair_close(&p);
}

static volatile int destroyed;

static void *destroy_cq(void *arg)
{
	OK(ibv_destroy_cq(arg));
	__atomic_store_n(&destroyed, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

/* Destroying a queue waits until its events are acknowledged. */
static void t_unacked(void)
{
	struct ibv_comp_channel *ch;
	struct ibv_cq *cq, *got;
	struct ibv_qp *qp;
	void *context;
	pthread_t t;
	int i;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC});
	ch = MUST(ibv_create_comp_channel(p.ctx));
	cq = MUST(ibv_create_cq(p.ctx, 16, NULL, ch, 0));
	struct ibv_qp_init_attr init = {.cap = {16, 16, 1, 1, 0},
					.qp_type = IBV_QPT_RC,
					.send_cq = cq,
					.recv_cq = cq};
	qp = MUST(ibv_create_qp(p.pd, &init));
	for (i = 0; i < 2; i++) {
		struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT,
					   .port_num = 1};
		struct ibv_recv_wr wr = {.wr_id = 5}, *bad;

		OK(ibv_modify_qp(qp, &attr,
				 IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					 IBV_QP_ACCESS_FLAGS));
		OK(ibv_post_recv(qp, &wr, &bad));
		OK(ibv_req_notify_cq(cq, 0));
		qp_to(qp, IBV_QPS_ERR);
		CHECK(fd_readable(ch->fd, 5000));
		CHECK(!ibv_get_cq_event(ch, &got, &context));
		CHECK(got == cq);
		qp_to(qp, IBV_QPS_RESET);
	}
	OK(ibv_destroy_qp(qp));
	OK(pthread_create(&t, NULL, destroy_cq, cq));
	sleep_ms(200);
	EQ(destroyed, 0);
	ibv_ack_cq_events(cq, 1);
	sleep_ms(200);
	EQ(destroyed, 0);
	ibv_ack_cq_events(cq, 1);
	OK(pthread_join(t, NULL));
	EQ(destroyed, 1);
	OK(ibv_destroy_comp_channel(ch));
	pair_close(&p);
}

/* Request notification, poll again, wait: no completion is missed. */
static void *event_sender(void *arg)
{
	uint64_t id;

	(void)arg;
	for (id = 1; id <= 1000; id++) {
		struct op op = op_on(&p.a, IBV_WR_SEND_WITH_IMM, id, 0,
				     id % 60 + 1);
		struct ibv_wc wc;

		op.imm = htonl(id);
		while (post_ops(&p.a, &op, 1, POST, NULL))
			sched_yield();
		wc = POLL(p.a.cq);
		EQ(wc.status, IBV_WC_SUCCESS);
		if (id % 97 == 0)
			sleep_ms(3);
	}
	return NULL;
}

static void t_event_loop(void)
{
	uint64_t next = 1, posted = 0, sleeps = 0;
	pthread_t t;

	open_events((struct pair_opts){.rnr_retry = 7, .min_rnr = 1});
	while (posted < 50)
		post_recv(&p.b, ++posted, 0, 64);
	OK(ibv_req_notify_cq(p.b.cq, 0));
	OK(pthread_create(&t, NULL, event_sender, NULL));
	while (next <= 1000) {
		struct ibv_wc wc;
		int n = ibv_poll_cq(p.b.cq, 1, &wc);

		if (!n) {
			/* Waits for the event, then arms and polls again. */
			CHECK(wait_event(p.b.ch, NULL, NULL, 10000));
			sleeps++;
			OK(ibv_req_notify_cq(p.b.cq, 0));
			continue;
		}
		EQ(n, 1);
		EQ(wc.wr_id, next);
		EQ(wc.imm_data, htonl(next));
		next++;
		if (posted < 1000)
			post_recv(&p.b, ++posted, 0, 64);
	}
	CHECK(sleeps > 5);
	OK(pthread_join(t, NULL));
	pair_close(&p);
}

/* SRQ limit, last WQE, drained send queue: events with their objects. */
static void t_async_events(void)
{
	struct ibv_srq_attr limit = {.srq_limit = 5};
	struct ibv_qp_attr sqd = {.qp_state = IBV_QPS_SQD,
				  .en_sqd_async_notify = 1};
	struct ibv_async_event ev;
	struct ibv_srq_attr got;
	int i;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .srq = true});
	for (i = 0; i < 10; i++)
		post_recv(&p.b, 100 + i, 0, 64);
	OK(ibv_modify_srq(p.b.srq, &limit, IBV_SRQ_LIMIT));
	OK(ibv_query_srq(p.b.srq, &got));
	EQ(got.srq_limit, 5);
	for (i = 0; i < 6; i++) {
		struct op op = op_on(&p.a, IBV_WR_SEND, i, 0, 8);

		POST_OK(&p.a, &op, 1, POST);
		EXPECT_WC(&p.a, i, IBV_WC_SEND, 8);
		EXPECT_WC(&p.b, 100 + i, IBV_WC_RECV, 8);
	}
	CHECK(wait_async(p.ctx, &ev, 5000));
	EQ(ev.event_type, IBV_EVENT_SRQ_LIMIT_REACHED);
	CHECK(ev.element.srq == p.b.srq);
	ibv_ack_async_event(&ev);

	OK(ibv_modify_qp(p.a.qp, &sqd,
			 IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY));
	if (wait_async(p.ctx, &ev, 500)) {
		EQ(ev.event_type, IBV_EVENT_SQ_DRAINED);
		CHECK(ev.element.qp == p.a.qp);
		ibv_ack_async_event(&ev);
	} else {
		printf("note: this kernel reports no drained queue\n");
	}

	qp_to(p.b.qp, IBV_QPS_ERR);
	if (wait_async(p.ctx, &ev, 1000)) {
		EQ(ev.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
		CHECK(ev.element.qp == p.b.qp);
		ibv_ack_async_event(&ev);
	} else {
		printf("note: this kernel reports no last WQE\n");
	}
	while (wait_async(p.ctx, &ev, 100)) {
		EQ(ev.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
		ibv_ack_async_event(&ev);
	}
	pair_close(&p);
}

static void *destroy_srq(void *arg)
{
	OK(ibv_destroy_srq(arg));
	__atomic_store_n(&destroyed, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

/* Destroying a shared receive queue waits for its asynchronous event. */
static void t_async_unacked_srq(void)
{
	struct ibv_srq_attr limit = {.srq_limit = 5};
	struct ibv_async_event ev;
	struct ibv_srq *srq;
	pthread_t t;
	int i;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .srq = true});
	for (i = 0; i < 10; i++)
		post_recv(&p.b, 100 + i, 0, 64);
	OK(ibv_modify_srq(p.b.srq, &limit, IBV_SRQ_LIMIT));
	for (i = 0; i < 6; i++) {
		struct op op = op_on(&p.a, IBV_WR_SEND, i, 0, 8);

		POST_OK(&p.a, &op, 1, POST);
		EXPECT_WC(&p.a, i, IBV_WC_SEND, 8);
	}
	CHECK(wait_async(p.ctx, &ev, 5000));
	EQ(ev.event_type, IBV_EVENT_SRQ_LIMIT_REACHED);
	srq = p.b.srq;
	p.b.srq = NULL;
	end_close(&p.b);
	OK(pthread_create(&t, NULL, destroy_srq, srq));
	sleep_ms(300);
	EQ(destroyed, 0);
	ibv_ack_async_event(&ev);
	OK(pthread_join(t, NULL));
	EQ(destroyed, 1);
	end_close(&p.a);
	OK(ibv_dealloc_pd(p.pd));
	OK(ibv_close_device(p.ctx));
}

static void *destroy_qp(void *arg)
{
	OK(ibv_destroy_qp(arg));
	__atomic_store_n(&destroyed, 1, __ATOMIC_SEQ_CST);
	return NULL;
}

/* Destroying a queue pair waits for its asynchronous events. */
static void t_async_unacked(void)
{
	struct ibv_async_event ev, more[8];
	pthread_t t;
	int i, n = 0;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .srq = true});
	qp_to(p.b.qp, IBV_QPS_ERR);
	if (!wait_async(p.ctx, &ev, 1000))
		SKIP("this kernel reports no last WQE");
	EQ(ev.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
	while (n < 8 && wait_async(p.ctx, &more[n], 100))
		n++;
	OK(pthread_create(&t, NULL, destroy_qp, p.b.qp));
	sleep_ms(200);
	EQ(destroyed, 0);
	for (i = 0; i < n; i++)
		ibv_ack_async_event(&more[i]);
	sleep_ms(100);
	EQ(destroyed, 0);
	ibv_ack_async_event(&ev);
	OK(pthread_join(t, NULL));
	EQ(destroyed, 1);
	/* Destroys the rest of the pair. */
	OK(ibv_destroy_srq(p.b.srq));
	OK(ibv_destroy_cq(p.b.cq));
	OK(ibv_dereg_mr(p.b.mr));
	end_close(&p.a);
	OK(ibv_dealloc_pd(p.pd));
	OK(ibv_close_device(p.ctx));
}

/* A thread that sleeps in ibv_get_cq_event is woken. */
static void *event_getter(void *arg)
{
	struct ibv_cq *cq;
	void *context;

	(void)arg;
	CHECK(!ibv_get_cq_event(p.b.ch, &cq, &context));
	CHECK(cq == p.b.cq);
	ibv_ack_cq_events(cq, 1);
	return NULL;
}

static void t_blocking(void)
{
	pthread_t t;

	open_events((struct pair_opts){});
	OK(ibv_req_notify_cq(p.b.cq, 0));
	OK(pthread_create(&t, NULL, event_getter, NULL));
	sleep_ms(100);
	send_range(1, 1);
	OK(pthread_join(t, NULL));
	expect_range(p.b.cq, 1, 1);
	pair_close(&p);
}

static const struct test_case cases[] = {
	{"ex-fields", t_ex_fields},
	{"ex-fields-ud", t_ex_fields_ud},
	{"single-threaded", t_single_threaded},
	{"ex-error", t_ex_error},
	{"ex-refused", t_ex_refused},
	{"sizes", t_sizes},
	{"poll-batches", t_poll_batches},
	{"resize", t_resize},
	{"resize-ex", t_resize_ex},
	{"resize-race", t_resize_race},
	{"notify", t_notify},
	{"solicited", t_solicited},
	{"shared-channel", t_shared_channel},
	{"unacked", t_unacked},
	{"event-loop", t_event_loop},
	{"async-events", t_async_events},
	{"async-unacked", t_async_unacked},
	{"async-unacked-srq", t_async_unacked_srq},
	{"blocking", t_blocking},
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, ARRAY_SIZE(cases), 90);
}

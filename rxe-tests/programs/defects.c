/* SPDX-License-Identifier: MIT */
/*
 * One case per known defect of the stock provider for rxe. manifest.txt has the
 * releases with which each case must fail.
 */
#include "common.h"
#include "calls.h"

static struct pair p;

static void send_one(uint64_t id)
{
	struct op op = op_on(&p.a, IBV_WR_SEND, id, 0, 8);

	post_recv(&p.b, id, 0, 64);
	POST_OK(&p.a, &op, 1, p.o.api);
	EXPECT_WC(&p.a, id, IBV_WC_SEND, 8);
}

/* Waits until ibv_start_poll succeeds; returns its result. */
static int start_poll(struct ibv_cq_ex *cq, unsigned ms)
{
	struct ibv_poll_cq_attr attr = {};
	double end = now_ms() + ms;
	int rc;

	while ((rc = ibv_start_poll(cq, &attr)) == ENOENT && now_ms() < end)
		sleep_ms(1);
	return rc;
}

/* A batch that ended with ENOENT consumes exactly the entries that it returned. */
static void t_next_poll_enoent(void)
{
	uint64_t id;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .cq_ex = true});
	for (id = 1; id <= 600; id++) { /* more than two wraps */
		struct op op = op_on(&p.a, IBV_WR_SEND, id, 0, 8);

		post_recv(&p.b, id, 0, 64);
		POST_OK(&p.a, &op, 1, POST);
		OK(start_poll(p.a.cqx, 5000));
		EQ(p.a.cqx->wr_id, id);
		EQ(p.a.cqx->status, IBV_WC_SUCCESS);
		EQ(ibv_next_poll(p.a.cqx), ENOENT);
		ibv_end_poll(p.a.cqx);

		OK(start_poll(p.b.cqx, 5000));
		EQ(p.b.cqx->wr_id, id);
		EQ(p.b.cqx->status, IBV_WC_SUCCESS);
		EQ(ibv_wc_read_byte_len(p.b.cqx), 8);
		EQ(ibv_wc_read_opcode(p.b.cqx), IBV_WC_RECV);
		EQ(ibv_next_poll(p.b.cqx), ENOENT);
		ibv_end_poll(p.b.cqx);
	}
	/* There are no further entries. */
	sleep_ms(20);
	EQ(start_poll(p.a.cqx, 0), ENOENT);
	EQ(start_poll(p.b.cqx, 0), ENOENT);
	pair_close(&p);
}

static volatile int second_started;

static void *second_poller(void *arg)
{
	struct ibv_cq_ex *cq = arg;

	OK(start_poll(cq, 8000));
	__atomic_store_n(&second_started, 1, __ATOMIC_SEQ_CST);
	EQ(cq->wr_id, 2);
	ibv_end_poll(cq);
	return NULL;
}

/*
 * A batch excludes other threads until end_poll, also after next_poll returned
 * ENOENT.
 */
static void t_double_unlock(void)
{
	pthread_t t;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .cq_ex = true});
	post_recv(&p.b, 1, 0, 64);
	post_recv(&p.b, 2, 0, 64);
	struct op op = op_on(&p.a, IBV_WR_SEND, 1, 0, 8);

	POST_OK(&p.a, &op, 1, POST);
	OK(start_poll(p.b.cqx, 5000));
	EQ(p.b.cqx->wr_id, 1);
	EQ(ibv_next_poll(p.b.cqx), ENOENT);
	/* Another thread polls for a second entry. */
	op.wr_id = 2;
	POST_OK(&p.a, &op, 1, POST);
	OK(start_poll(p.a.cqx, 5000));
	ibv_end_poll(p.a.cqx);
	OK(pthread_create(&t, NULL, second_poller, p.b.cqx));
	sleep_ms(300);
	if (__atomic_load_n(&second_started, __ATOMIC_SEQ_CST))
		FAIL("a second thread polls before the first has ended its batch");
	ibv_end_poll(p.b.cqx);
	OK(pthread_join(t, NULL));
	EQ(second_started, 1);
	pair_close(&p);
}

/* The length of an inline list is the sum of its elements. */
static void t_inline_list(void)
{
	uint8_t data[3][16];
	struct op op = {.opcode = IBV_WR_SEND,
			.flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
			.wr_id = 9,
			.list = true,
			.nsge = 3};
	int i;

	pair_open(&p, (struct pair_opts){
			      .type = IBV_QPT_RC, .api = WR, .inl = 64});
	for (i = 0; i < 3; i++) {
		pattern(data[i], 16, i);
		op.sge[i] = (struct ibv_sge){(uintptr_t)data[i], 5 + i, 0};
	}
	post_recv(&p.b, 10, 0, 64);
	POST_OK(&p.a, &op, 1, WR);
	EXPECT_WC(&p.a, 9, IBV_WC_SEND, 18);
	EXPECT_WC(&p.b, 10, IBV_WC_RECV, 18);
	CHECK_PATTERN(p.b.buf, 5, 0);
	CHECK_PATTERN(p.b.buf + 5, 6, 1);
	CHECK_PATTERN(p.b.buf + 11, 7, 2);
	CHECK_BYTE(p.b.buf + 18, 46, 0xee);
	pair_close(&p);
}

/* An inline list whose sum exceeds the maximum is refused as a whole. */
static void t_inline_list_bound(void)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	uint8_t data[512] = {};
	struct op op = {.opcode = IBV_WR_SEND,
			.flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
			.wr_id = 9,
			.list = true,
			.nsge = 8};
	int i, rc;

	pair_open(&p, (struct pair_opts){
			      .type = IBV_QPT_RC, .api = WR, .inl = 64});
	OK(ibv_query_qp(p.a.qp, &attr, IBV_QP_CAP, &init));
	CHECK(init.cap.max_inline_data <= sizeof(data));
	for (i = 0; i < 8; i++)
		op.sge[i] = (struct ibv_sge){(uintptr_t)data,
					     init.cap.max_inline_data / 2, 0};
	rc = post_ops(&p.a, &op, 1, WR, NULL);
	if (rc != ENOSPC && rc != EINVAL && rc != ENOMEM)
		FAIL("an inline list that is too long returned %d", rc);
	EXPECT_NO_WC(p.a.cq);
	send_one(1);
	pair_close(&p);
}

/* The length of an SGE list is the sum of its elements. */
static void t_sge_list(void)
{
	struct op op;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .api = WR});
	op = op_on(&p.a, IBV_WR_SEND, 3, 0, 4);
	op.list = true;
	op.nsge = 3;
	op.sge[1] = sge_on(&p.a, 100, 30);
	op.sge[2] = sge_on(&p.a, 200, 200);
	pattern(p.a.buf, 4, 1);
	pattern(p.a.buf + 100, 30, 2);
	pattern(p.a.buf + 200, 200, 3);
	post_recv(&p.b, 4, 0, 1000);
	POST_OK(&p.a, &op, 1, WR);
	EXPECT_WC(&p.a, 3, IBV_WC_SEND, 234);
	EXPECT_WC(&p.b, 4, IBV_WC_RECV, 234);
	CHECK_PATTERN(p.b.buf, 4, 1);
	CHECK_PATTERN(p.b.buf + 4, 30, 2);
	CHECK_PATTERN(p.b.buf + 34, 200, 3);
	pair_close(&p);
}

/*
 * Inline lengths whose sum overflows 32 bits. In a child process: a provider that
 * uses that sum overwrites its queue with 4 GiB.
 */
static void inline_overflow(void)
{
	const size_t huge = 0xffffffffu;
	struct op op;
	int posted = -1;
	void *large = mmap(NULL, huge + 4096, PROT_READ,
			   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	CHECK(large != MAP_FAILED);
	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .inl = 64});
	op = op_on(&p.a, IBV_WR_SEND, 3, 0, 4);
	op.flags |= IBV_SEND_INLINE;
	op.nsge = 2;
	op.sge[0] = (struct ibv_sge){(uintptr_t)large, huge, 0};
	op.sge[1] = (struct ibv_sge){(uintptr_t)large, 17, 0};
	EQ(post_ops(&p.a, &op, 1, POST, &posted), EINVAL);
	EQ(posted, 0);
	send_one(1);
	pair_close(&p);
}

static void t_inline_overflow(void)
{
	in_child(inline_overflow, "inline send of 4 GiB and 16 bytes");
}

/* A refused resize returns the errno, and the queue is unchanged. */
static void t_resize_refused(void)
{
	struct ibv_device_attr dev;
	int cqe, i, rc;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC});
	OK(ibv_query_device(p.ctx, &dev));
	cqe = p.b.cq->cqe;
	errno = EXDEV; /* no call here sets it */
	rc = ibv_resize_cq(p.b.cq, dev.max_cqe + 1);
	EQ(rc, EINVAL);
	EQ(p.b.cq->cqe, cqe);
	for (i = 1; i < 20; i++) {
		struct op op = op_on(&p.a, IBV_WR_SEND, i, 0, 8);

		post_recv(&p.b, 100 + i, 0, 64);
		POST_OK(&p.a, &op, 1, POST);
		EXPECT_WC(&p.a, i, IBV_WC_SEND, 8);
	}
	sleep_ms(20);
	/* There are 19 unread entries, too many for 7. */
	errno = EXDEV;
	rc = ibv_resize_cq(p.b.cq, 7);
	EQ(rc, EINVAL);
	EQ(p.b.cq->cqe, cqe);
	for (i = 1; i < 20; i++)
		EXPECT_WC(&p.b, 100 + i, IBV_WC_RECV, 8);
	EXPECT_NO_WC(p.b.cq);
	pair_close(&p);
}

/*
 * The new queue cannot be mapped. The kernel already uses it, so entries may be
 * lost, but the call returns ENOMEM, later polls do not access unmapped memory, and
 * all objects can be destroyed.
 */
static void resize_map_fails(void)
{
	struct ibv_wc wc;
	unsigned maps;
	int rc;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC});
	send_one(1);
	EXPECT_WC(&p.b, 1, IBV_WC_RECV, 8);
	maps = count_maps("/dev/infiniband/");
	mmap_fail = 1;
	errno = EXDEV; /* no call here sets it */
	rc = ibv_resize_cq(p.b.cq, 1000);
	EQ(mmap_fail, 0);
	EQ(rc, ENOMEM);
	rc = ibv_poll_cq(p.b.cq, 1, &wc);
	CHECK(rc <= 0);
	CHECK(count_maps("/dev/infiniband/") <= maps);
	/* A second resize may succeed; it must not crash. */
	if (!ibv_resize_cq(p.b.cq, 500)) {
		send_one(2);
		EXPECT_WC(&p.b, 2, IBV_WC_RECV, 8);
	}
	pair_close(&p);
}

static void t_resize_map_fails(void)
{
	in_child(resize_map_fails, "poll after a resize that failed");
}

/* The queue's first word is the entry size: 8 bytes are too small. */
static void corrupt_entry_size(void *addr, size_t len)
{
	(void)len;
	*(volatile uint32_t *)addr = 3;
}

/* A queue refused after it was mapped leaks no mapping and sets errno. */
static void create_leak(bool ex)
{
	struct ibv_context *ctx = open_device();
	const char *dev = ibv_get_device_name(ctx->device);
	unsigned before = count_maps("/dev/infiniband/");
	int i, cqs = kernel_objects(dev, "cq");

	for (i = 0; i < 50; i++) {
		struct ibv_cq_init_attr_ex attr = {.cqe = 100};
		const void *cq;

		mmap_hook = corrupt_entry_size;
		errno = 0;
		if (ex)
			cq = ibv_create_cq_ex(ctx, &attr);
		else
			cq = ibv_create_cq(ctx, 100, NULL, NULL, 0);
		mmap_hook = NULL;
		if (cq)
			FAIL("a queue of 8-byte entries was accepted");
		CHECK(errno != 0);
	}
	EQ(count_maps("/dev/infiniband/"), before);
	if (cqs >= 0)
		EQ(kernel_objects(dev, "cq"), cqs);
	OK(ibv_close_device(ctx));
}

static void t_create_leak(void)
{
	create_leak(false);
}

static void t_create_ex_leak(void)
{
	create_leak(true);
}

/* An unknown attribute of an extended queue is refused with an errno. */
static void t_cq_ex_errno(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_cq_init_attr_ex attr = {.cqe = 10, .comp_mask = 1 << 9};
	struct ibv_device_attr dev;

	OK(ibv_query_device(ctx, &dev));
	NULL_WITH(ibv_create_cq_ex(ctx, &attr), EOPNOTSUPP);
	attr.comp_mask = 0;
	attr.cqe = dev.max_cqe + 1;
	NULL_WITH(ibv_create_cq_ex(ctx, &attr), EINVAL);
	OK(ibv_close_device(ctx));
}

/* Any mapping that fails in a create call: NULL and ENOMEM, without a leak. */
static void t_create_map_fails(void)
{
	struct ibv_context *ctx = open_device();
	const char *dev = ibv_get_device_name(ctx->device);
	struct ibv_pd *pd = MUST(ibv_alloc_pd(ctx));
	struct ibv_cq *cq = MUST(ibv_create_cq(ctx, 10, NULL, NULL, 0));
	unsigned before = count_maps("/dev/infiniband/");
	int cqs = kernel_objects(dev, "cq"), qps = kernel_objects(dev, "qp");
	int srqs = kernel_objects(dev, "srq"), i;

	for (i = 0; i < 20; i++) {
		struct ibv_cq_init_attr_ex cq_attr = {.cqe = 100};
		struct ibv_srq_init_attr srq_attr = {
			.attr = {.max_wr = 10, .max_sge = 1}};
		struct ibv_qp_init_attr qp_attr = {
			.send_cq = cq,
			.recv_cq = cq,
			.cap = {10, 10, 1, 1, 0},
			.qp_type = IBV_QPT_RC};
		struct ibv_qp_init_attr_ex qpx_attr = {
			.send_cq = cq,
			.recv_cq = cq,
			.cap = {10, 10, 1, 1, 0},
			.qp_type = IBV_QPT_RC,
			.comp_mask = IBV_QP_INIT_ATTR_PD,
			.pd = pd};
		int nth;

		mmap_fail = 1;
		NULL_WITH(ibv_create_cq(ctx, 10, NULL, NULL, 0), ENOMEM);
		mmap_fail = 1;
		NULL_WITH(ibv_create_cq_ex(ctx, &cq_attr), ENOMEM);
		mmap_fail = 1;
		NULL_WITH(ibv_create_srq(pd, &srq_attr), ENOMEM);
		for (nth = 1; nth <= 2; nth++) {
			struct ibv_qp_init_attr a = qp_attr;
			struct ibv_qp_init_attr_ex x = qpx_attr;

			mmap_fail = nth;
			NULL_WITH(ibv_create_qp(pd, &a), ENOMEM);
			mmap_fail = nth;
			NULL_WITH(ibv_create_qp_ex(ctx, &x), ENOMEM);
		}
		EQ(mmap_fail, 0);
	}
	EQ(count_maps("/dev/infiniband/"), before);
	if (cqs >= 0)
		EQ(kernel_objects(dev, "cq"), cqs);
	if (qps >= 0)
		EQ(kernel_objects(dev, "qp"), qps);
	if (srqs >= 0)
		EQ(kernel_objects(dev, "srq"), srqs);
	OK(ibv_destroy_cq(cq));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
}

/* Start and complete without a work request ring no doorbell. */
static void t_empty_batch(void)
{
	int i;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .api = WR});
	send_one(1);
	syscalls = 0;
	for (i = 0; i < 10; i++) {
		ibv_wr_start(p.a.qpx);
		OK(ibv_wr_complete(p.a.qpx));
	}
	EQ(syscalls, 0);
	send_one(2);
	pair_close(&p);
}

/* A list whose first work request is refused rings no doorbell. */
static void t_refused_doorbell(void)
{
	struct op op;
	int i, posted;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .sge = 1});
	send_one(1);
	op = op_on(&p.a, IBV_WR_SEND, 2, 0, 8);
	op.nsge = 30;
	syscalls = 0;
	for (i = 0; i < 10; i++) {
		EQ(post_ops(&p.a, &op, 1, POST, &posted), EINVAL);
		EQ(posted, 0);
	}
	EQ(syscalls, 0);
	send_one(2);
	pair_close(&p);
}

/* The doorbell is one system call per batch. */
static void t_one_doorbell(void)
{
	struct op ops[16];
	enum api api;
	int i;

	for (api = POST; api <= WR; api++) {
		pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC,
						 .api = api});
		for (i = 0; i < 16; i++) {
			ops[i] = op_on(&p.a, IBV_WR_SEND, i, 0, 8);
			post_recv(&p.b, i, 0, 64);
		}
		syscalls = 0;
		POST_OK(&p.a, ops, 16, api);
		EQ(syscalls, 1);
		for (i = 0; i < 16; i++)
			EXPECT_WC(&p.a, i, IBV_WC_SEND, 8);
		EQ(syscalls, 1); /* polling needs none */
		pair_close(&p);
	}
}

/* A null list is refused, as the stock provider refuses it. */
static void t_null_list(void)
{
	struct ibv_send_wr *bad_send;
	struct ibv_recv_wr *bad_recv;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC});
	send_one(1);
	syscalls = 0;
	EQ(ibv_post_send(p.a.qp, NULL, &bad_send), EINVAL);
	EQ(ibv_post_recv(p.a.qp, NULL, &bad_recv), EINVAL);
	EQ(syscalls, 0);
	send_one(2);
	pair_close(&p);
}

static const struct test_case cases[] = {
	{"next-poll-enoent", t_next_poll_enoent},
	{"double-unlock", t_double_unlock},
	{"inline-list", t_inline_list},
	{"inline-list-bound", t_inline_list_bound},
	{"sge-list", t_sge_list},
	{"inline-overflow", t_inline_overflow},
	{"resize-refused", t_resize_refused},
	{"resize-map-fails", t_resize_map_fails},
	{"create-leak", t_create_leak},
	{"create-ex-leak", t_create_ex_leak},
	{"cq-ex-errno", t_cq_ex_errno},
	{"create-map-fails", t_create_map_fails},
	{"empty-batch", t_empty_batch},
	{"refused-doorbell", t_refused_doorbell},
	{"one-doorbell", t_one_doorbell},
	{"null-list", t_null_list},
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, ARRAY_SIZE(cases), 60);
}

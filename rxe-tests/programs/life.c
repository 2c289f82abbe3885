/* SPDX-License-Identifier: MIT */
/*
 * Object lifetimes: repeated creation and destruction, wrong order of destruction,
 * failing allocations, fork.
 */
#include "common.h"

#include <malloc.h>

static struct pair p;

/* --- failing allocations --- */

extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *old, size_t n);
extern void *__libc_memalign(size_t align, size_t n);

/* Number of this thread's allocations until one fails (0: none fails), and so far. */
static __thread unsigned alloc_fail, alloc_count;

static bool alloc_fails(void)
{
	alloc_count++;
	if (alloc_fail && --alloc_fail == 0) {
		errno = ENOMEM;
		return true;
	}
	return false;
}

void *malloc(size_t n)
{
	return alloc_fails() ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
	return alloc_fails() ? NULL : __libc_calloc(n, size);
}

void *realloc(void *old, size_t n)
{
	return alloc_fails() ? NULL : __libc_realloc(old, n);
}

void *memalign(size_t align, size_t n)
{
	return alloc_fails() ? NULL : __libc_memalign(align, n);
}

void *aligned_alloc(size_t align, size_t n)
{
	return alloc_fails() ? NULL : __libc_memalign(align, n);
}

int posix_memalign(void **out, size_t align, size_t n)
{
	void *at = alloc_fails() ? NULL : __libc_memalign(align, n);

	if (!at)
		return ENOMEM;
	*out = at;
	return 0;
}

static size_t heap_used(void)
{
	struct mallinfo2 m = mallinfo2();

	return m.uordblks + m.hblkhd;
}

/* --- one of each object --- */

struct objects {
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_mw *mw1, *mw2;
	struct ibv_comp_channel *ch;
	struct ibv_cq *cq;
	struct ibv_cq_ex *cqx;
	struct ibv_srq *srq;
	struct ibv_qp *qp, *qpx, *ud;
	struct ibv_ah *ah;
};

static union ibv_gid gid;
static int gid_idx;
static char memory[65536] __attribute__((aligned(4096)));

static struct ibv_qp_init_attr qp_attr(struct objects *s, enum ibv_qp_type type)
{
	return (struct ibv_qp_init_attr){.send_cq = s->cq,
					 .recv_cq = s->cq,
					 .cap = {16, 16, 2, 2, 64},
					 .qp_type = type};
}

static struct ibv_qp *create_qpx(struct ibv_context *ctx, struct objects *s)
{
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = ibv_cq_ex_to_cq(s->cqx),
		.recv_cq = ibv_cq_ex_to_cq(s->cqx),
		.srq = s->srq,
		.cap = {16, 0, 2, 0, 64},
		.qp_type = IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD |
			     IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = s->pd,
		.send_ops_flags = IBV_QP_EX_WITH_SEND};

	return ibv_create_qp_ex(ctx, &attr);
}

static struct ibv_cq_ex *create_cqx(struct ibv_context *ctx, struct objects *s)
{
	struct ibv_cq_init_attr_ex attr = {
		.cqe = 32, .channel = s->ch, .wc_flags = IBV_WC_EX_WITH_BYTE_LEN};

	return ibv_create_cq_ex(ctx, &attr);
}

static struct ibv_srq *create_srq(struct objects *s)
{
	struct ibv_srq_init_attr attr = {.attr = {.max_wr = 16, .max_sge = 2}};

	return ibv_create_srq(s->pd, &attr);
}

static struct ibv_ah *create_ah(struct objects *s)
{
	struct ibv_ah_attr attr = {.is_global = 1,
				   .port_num = 1,
				   .grh = {.dgid = gid,
					   .sgid_index = gid_idx,
					   .hop_limit = 64}};

	return ibv_create_ah(s->pd, &attr);
}

/* Creates the objects; bits 0 to 2 of `qps` select the queue pairs. */
static void objects_open(struct ibv_context *ctx, struct objects *s, unsigned qps)
{
	struct ibv_qp_init_attr attr;
	struct ibv_qp_attr to_init = {.qp_state = IBV_QPS_INIT,
				      .port_num = 1,
				      .qkey = QKEY};
	struct ibv_recv_wr wr = {.wr_id = 1}, *bad;

	memset(s, 0, sizeof(*s));
	s->pd = MUST(ibv_alloc_pd(ctx));
	s->mr = MUST(ibv_reg_mr(s->pd, memory, sizeof(memory),
				IBV_ACCESS_LOCAL_WRITE));
	s->mw1 = MUST(ibv_alloc_mw(s->pd, IBV_MW_TYPE_1));
	s->mw2 = MUST(ibv_alloc_mw(s->pd, IBV_MW_TYPE_2));
	s->ch = MUST(ibv_create_comp_channel(ctx));
	s->cq = MUST(ibv_create_cq(ctx, 32, NULL, s->ch, 0));
	s->cqx = MUST(create_cqx(ctx, s));
	s->srq = MUST(create_srq(s));
	s->ah = MUST(create_ah(s));
	OK(ibv_resize_cq(s->cq, 100));
	attr = qp_attr(s, IBV_QPT_RC);
	if (qps & 1)
		s->qp = MUST(ibv_create_qp(s->pd, &attr));
	if (qps & 2)
		s->qpx = MUST(create_qpx(ctx, s));
	if (!(qps & 4))
		return;
	attr = qp_attr(s, IBV_QPT_UD);
	s->ud = MUST(ibv_create_qp(s->pd, &attr));
	OK(ibv_modify_qp(s->ud, &to_init,
			 IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				 IBV_QP_QKEY));
	OK(ibv_post_recv(s->ud, &wr, &bad));
}

static void objects_close(struct objects *s)
{
	OK(ibv_destroy_ah(s->ah));
	if (s->ud)
		OK(ibv_destroy_qp(s->ud));
	if (s->qpx)
		OK(ibv_destroy_qp(s->qpx));
	if (s->qp)
		OK(ibv_destroy_qp(s->qp));
	OK(ibv_destroy_srq(s->srq));
	OK(ibv_destroy_cq(ibv_cq_ex_to_cq(s->cqx)));
	OK(ibv_destroy_cq(s->cq));
	OK(ibv_destroy_comp_channel(s->ch));
	OK(ibv_dealloc_mw(s->mw2));
	OK(ibv_dealloc_mw(s->mw1));
	OK(ibv_dereg_mr(s->mr));
	OK(ibv_dealloc_pd(s->pd));
}

static struct ibv_context *open_and_query_gid(void)
{
	struct ibv_context *ctx = open_device();

	gid_idx = gid_index(ctx);
	OK(ibv_query_gid(ctx, 1, gid_idx, &gid));
	return ctx;
}

/* Memory, mappings and files must not grow in `rounds` rounds. */
static void check_no_growth(int rounds, void (*round)(void))
{
	unsigned maps, fds;
	unsigned long rss;
	size_t heap, heap_after;
	double start;
	int i;

	for (i = 0; i < 200; i++)
		round();
	maps = count_maps("");
	fds = count_fds();
	rss = rss_kb();
	heap = heap_used();
	start = now_ms();
	for (i = 0; i < rounds; i++)
		round();
	heap_after = heap_used(); /* before stdio allocates */
	printf("%d rounds in %.1f s; heap %zu to %zu, RSS %lu to %lu kB, %u maps, %u fds\n",
	       rounds, (now_ms() - start) / 1e3, heap, heap_after, rss,
	       rss_kb(), maps, fds);
	EQ(count_fds(), fds);
	EQ(count_maps("/dev/infiniband/"), 0);
	CHECK(count_maps("") <= maps + 1); /* the heap may split once */
	CHECK(heap_after <= heap + 4096);
	CHECK(rss_kb() <= rss + 512);
}

static struct ibv_context *churn_ctx;

static void churn_round(void)
{
	static unsigned round;
	struct objects s;

	/* Queue pairs take the most time: one type per round, in turn. */
	objects_open(churn_ctx, &s, 1u << round++ % 3);
	objects_close(&s);
}

static void t_churn(void)
{
	churn_ctx = open_and_query_gid();
	/* A leak of 16 bytes for one type adds up to 10 kB. */
	check_no_growth(2000, churn_round);
	OK(ibv_close_device(churn_ctx));
}

static void reopen_round(void)
{
	struct ibv_device **list = MUST(ibv_get_device_list(NULL));
	const char *name = getenv("RXE_DEV");
	struct ibv_context *ctx;
	int i;

	for (i = 0; list[i] && name && strcmp(ibv_get_device_name(list[i]), name);
	     i++)
		;
	ctx = MUST(ibv_open_device(MUST(list[i])));
	OK(ibv_close_device(ctx));
	ibv_free_device_list(list);
}

static void t_churn_open(void)
{
	OK(ibv_close_device(open_and_query_gid()));
	check_no_growth(1000, reopen_round);
}

/* Closing the device with all objects open: the kernel destroys them, and the
 * close must not access their mappings. */
static void t_close_with_all(void)
{
	struct ibv_context *ctx = open_and_query_gid();
	struct objects s;
	unsigned fds = count_fds();

	objects_open(ctx, &s, 7);
	OK(ibv_close_device(ctx));
	CHECK(count_fds() <= fds);
	/* The device still works. */
	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC});
	pair_close(&p);
}

/* --- wrong order of destruction --- */

#define BUSY(call)                                                             \
	do {                                                                   \
		int rc_ = (call);                                              \
		if (rc_ != EBUSY && rc_ != EINVAL)                             \
			FAIL("%s returned %d, not EBUSY", #call, rc_);         \
	} while (0)

static void traffic(unsigned seed)
{
	struct op op = op_on(&p.a, IBV_WR_SEND, seed, 0, 3000);

	pattern(p.a.buf, 3000, seed);
	post_recv(&p.b, 1000 + seed, 0, 4000);
	POST_OK(&p.a, &op, 1, p.o.api);
	EXPECT_WC(&p.a, seed, IBV_WC_SEND, 3000);
	EXPECT_WC(&p.b, 1000 + seed, IBV_WC_RECV, 3000);
	CHECK_PATTERN(p.b.buf, 3000, seed);
}

static void t_wrong_order(void)
{
	struct ibv_mw *mw;
	struct ibv_mw_bind bind = {.wr_id = 9, .send_flags = IBV_SEND_SIGNALED};
	struct ibv_context *ctx;
	struct objects s;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	union ibv_gid group;
	int i;

	pair_open(&p, (struct pair_opts){
			      .type = IBV_QPT_RC, .srq = true, .events = true});
	for (i = 0; i < 3; i++) {
		traffic(10 * i);
		BUSY(ibv_destroy_cq(p.a.cq));
		BUSY(ibv_destroy_cq(p.b.cq));
		traffic(10 * i + 1);
		BUSY(ibv_destroy_srq(p.b.srq));
		traffic(10 * i + 2);
		BUSY(ibv_dealloc_pd(p.pd));
		BUSY(ibv_destroy_comp_channel(p.a.ch));
		traffic(10 * i + 3);
	}
	/* The queues can still be polled, armed and resized. */
	OK(ibv_req_notify_cq(p.b.cq, 0));
	OK(ibv_resize_cq(p.b.cq, 1000));
	traffic(99);
	CHECK(wait_event(p.b.ch, NULL, NULL, 1000));
	/* A region with a bound window. */
	mw = MUST(ibv_alloc_mw(p.pd, IBV_MW_TYPE_1));
	bind.bind_info = (struct ibv_mw_bind_info){
		.mr = p.a.mr,
		.addr = (uintptr_t)p.a.buf,
		.length = 100,
		.mw_access_flags = IBV_ACCESS_REMOTE_READ};
	OK(ibv_bind_mw(p.a.qp, mw, &bind));
	EXPECT_WC(&p.a, 9, IBV_WC_BIND_MW, 0);
	BUSY(ibv_dereg_mr(p.a.mr));
	traffic(100);
	OK(ibv_dealloc_mw(mw));
	pair_close(&p);

	/* A queue pair in a multicast group. */
	ctx = open_and_query_gid();
	objects_open(ctx, &s, 7);
	memset(&group, 0, sizeof(group));
	group.raw[0] = 0xff;
	group.raw[1] = 0x0e;
	group.raw[15] = 0x42;
	OK(ibv_attach_mcast(s.ud, &group, 0));
	BUSY(ibv_destroy_qp(s.ud));
	OK(ibv_query_qp(s.ud, &attr, IBV_QP_STATE, &init));
	EQ(attr.qp_state, IBV_QPS_INIT);
	OK(ibv_detach_mcast(s.ud, &group, 0));
	objects_close(&s);
	OK(ibv_close_device(ctx));
}

/* --- create calls with failing allocations --- */

/*
 * Evaluates `expr` with its first, second ... allocation failing, until it succeeds
 * with fewer allocations: each failure is NULL with ENOMEM, and heap, mappings and
 * the kernel's objects are unchanged.
 */
#define FAIL_EACH_ALLOC(type, expr, destroy)                                   \
	do {                                                                   \
		/* Fills the heap's caches of freed memory. */                 \
		for (int warm_ = 0; warm_ < 10; warm_++)                       \
			OK(destroy(MUST(expr)));                               \
		unsigned n_, maps_ = count_maps("");                           \
		int obj_ = kernel_objects(dev, #type);                         \
		size_t heap_ = heap_used(), end_;                              \
		for (n_ = 1; n_ < 100; n_++) {                                 \
			errno = 0;                                             \
			alloc_fail = n_;                                       \
			__auto_type it_ = (expr);                              \
			int e_ = errno;                                        \
			bool injected_ = !alloc_fail;                          \
			alloc_fail = 0;                                        \
			if (it_) {                                             \
				OK(destroy(it_));                              \
				if (!injected_)                                \
					break;                                 \
				continue;                                      \
			}                                                      \
			if (!injected_)                                        \
				FAIL("%s failed by itself, errno %d", #expr,   \
				     e_);                                      \
			if (e_ != ENOMEM)                                      \
				FAIL("%s without memory: errno %d", #expr,     \
				     e_);                                      \
		}                                                              \
		end_ = heap_used();                                            \
		printf("%s: %u allocations\n", #expr, n_ - 1);                 \
		CHECK(n_ < 100);                                               \
		if (end_ > heap_ + 64)                                         \
			FAIL("%s: %zu bytes leaked", #expr, end_ - heap_);     \
		EQ(count_maps(""), maps_);                                     \
		if (obj_ >= 0)                                                 \
			EQ(kernel_objects(dev, #type), obj_);                  \
	} while (0)

static int destroy_cqx(struct ibv_cq_ex *cq)
{
	return ibv_destroy_cq(ibv_cq_ex_to_cq(cq));
}

static void t_nomem(void)
{
	struct ibv_context *ctx = open_and_query_gid();
	const char *dev = ibv_get_device_name(ctx->device);
	struct ibv_qp_init_attr rc, ud;
	struct objects s;

	objects_open(ctx, &s, 7);
	printf("warm\n");
	kernel_objects(dev, "qp");
	FAIL_EACH_ALLOC(pd, ibv_alloc_pd(ctx), ibv_dealloc_pd);
	FAIL_EACH_ALLOC(mr, (ibv_reg_mr)(s.pd, memory, 4096, 0), ibv_dereg_mr);
	FAIL_EACH_ALLOC(mw, ibv_alloc_mw(s.pd, IBV_MW_TYPE_2), ibv_dealloc_mw);
	FAIL_EACH_ALLOC(cq, ibv_create_cq(ctx, 8, NULL, s.ch, 0), ibv_destroy_cq);
	FAIL_EACH_ALLOC(cq, create_cqx(ctx, &s), destroy_cqx);
	FAIL_EACH_ALLOC(srq, create_srq(&s), ibv_destroy_srq);
	rc = qp_attr(&s, IBV_QPT_RC);
	FAIL_EACH_ALLOC(qp, ibv_create_qp(s.pd, &rc), ibv_destroy_qp);
	ud = qp_attr(&s, IBV_QPT_UD);
	FAIL_EACH_ALLOC(qp, ibv_create_qp(s.pd, &ud), ibv_destroy_qp);
	FAIL_EACH_ALLOC(qp, create_qpx(ctx, &s), ibv_destroy_qp);
	FAIL_EACH_ALLOC(ah, create_ah(&s), ibv_destroy_ah);
	objects_close(&s);
	OK(ibv_close_device(ctx));
}

/* Opening with failing allocations must not crash; libibverbs's result may vary. */
static void t_nomem_open(void)
{
	struct ibv_device **list;
	struct ibv_context *ctx;
	const char *name = getenv("RXE_DEV");
	unsigned n, fds;
	bool injected;
	int i;

	OK(ibv_close_device(open_and_query_gid()));
	list = MUST(ibv_get_device_list(NULL));
	for (i = 0; list[i] && name && strcmp(ibv_get_device_name(list[i]), name);
	     i++)
		;
	CHECK(list[i]);
	fds = count_fds();
	for (n = 1; n < 200; n++) {
		alloc_fail = n;
		ctx = ibv_open_device(list[i]);
		injected = !alloc_fail;
		alloc_fail = 0;
		if (ctx)
			OK(ibv_close_device(ctx));
		if (ctx && !injected)
			break;
		CHECK(injected);
		EQ(count_fds(), fds);
	}
	printf("%u allocations\n", n - 1);
	CHECK(n > 1 && n < 200);
	ibv_free_device_list(list);
	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC});
	traffic(1);
	pair_close(&p);
}

/* The data path does not allocate. */
static void t_no_alloc(void)
{
	struct ibv_wc wc[16];
	struct op ops[8];
	enum api api;
	unsigned seen;
	int i, n;

	for (api = POST; api <= WR; api++) {
		pair_open(&p, (struct pair_opts){
				      .type = IBV_QPT_RC, .api = api, .inl = 64});
		traffic(1);
		struct ibv_send_wr wr[8] = {}, *bad;
		struct ibv_recv_wr rwr = {}, *rbad;
		struct ibv_sge rsge = sge_on(&p.b, 0, 64);

		for (i = 0; i < 8; i++) {
			ops[i] = op_on(&p.a, IBV_WR_SEND, i, 0, 8);
			if (i % 2)
				ops[i].flags |= IBV_SEND_INLINE;
			wr[i].next = i < 7 ? &wr[i + 1] : NULL;
			wr[i].wr_id = i;
			wr[i].sg_list = ops[i].sge;
			wr[i].num_sge = 1;
			wr[i].opcode = IBV_WR_SEND;
			wr[i].send_flags = ops[i].flags;
		}
		rwr.sg_list = &rsge;
		rwr.num_sge = 1;
		seen = alloc_count;
		for (i = 0; i < 8; i++)
			OK(ibv_post_recv(p.b.qp, &rwr, &rbad));
		if (api == POST)
			OK(ibv_post_send(p.a.qp, wr, &bad));
		else
			POST_OK(&p.a, ops, 8, WR);
		for (n = 0; n < 8;) {
			int got = ibv_poll_cq(p.a.cq, 16, wc);

			CHECK(got >= 0);
			n += got;
		}
		OK(ibv_req_notify_cq(p.a.cq, 0));
		EQ(alloc_count, seen);
		pair_close(&p);
	}
}

/* --- fork --- */

enum child_action { EXITS, EXECS, WRITES, OPENS };

static void fork_case(enum child_action action)
{
	pid_t pid;
	int st, i;
	unsigned maps;

	/*
	 * ibv_fork_init may unmap registered memory in the child, which must not
	 * access it then. It is not needed if the kernel copies the memory.
	 */
	if (action != WRITES)
		OK(ibv_fork_init());
	else if (ibv_is_fork_initialized() != IBV_FORK_UNNEEDED)
		SKIP("this kernel does not report that it copies at fork");
	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .events = true});
	traffic(1);
	maps = count_maps("");
	for (i = 0; i < 5; i++) {
		/* Posted before the fork and completed after it. */
		post_recv(&p.b, 500, 8192, 4000);
		pid = fork();
		CHECK(pid >= 0);
		if (!pid) {
			if (action == EXECS) {
				execl("/bin/true", "true", NULL);
				_exit(9);
			}
			if (action == WRITES) {
				memset(p.a.buf, 0x77, 16384);
				memset(p.b.buf, 0x77, 16384);
			}
			if (action == OPENS) {
				struct pair q;

				pair_open(&q, (struct pair_opts){
						      .type = IBV_QPT_RC});
				struct op op =
					op_on(&q.a, IBV_WR_SEND, 3, 0, 100);
				pattern(q.a.buf, 100, 3);
				post_recv(&q.b, 4, 0, 100);
				POST_OK(&q.a, &op, 1, POST);
				EXPECT_WC(&q.a, 3, IBV_WC_SEND, 100);
				EXPECT_WC(&q.b, 4, IBV_WC_RECV, 100);
				CHECK_PATTERN(q.b.buf, 100, 3);
				pair_close(&q);
			}
			if (i % 2)
				sleep_ms(100);
			_exit(0);
		}
		/* While the child runs, or after its exit. */
		struct op op = op_on(&p.a, IBV_WR_SEND, 7, 0, 3000);

		if (i % 2 == 0)
			CHECK(waitpid(pid, &st, 0) == pid);
		pattern(p.a.buf, 3000, 60 + i);
		OK(ibv_req_notify_cq(p.b.cq, 0));
		POST_OK(&p.a, &op, 1, POST);
		EXPECT_WC(&p.a, 7, IBV_WC_SEND, 3000);
		CHECK(wait_event(p.b.ch, NULL, NULL, 5000));
		EXPECT_WC(&p.b, 500, IBV_WC_RECV, 3000);
		CHECK_PATTERN(p.b.buf + 8192, 3000, 60 + i);
		if (i % 2)
			CHECK(waitpid(pid, &st, 0) == pid);
		CHECK(WIFEXITED(st));
		EQ(WEXITSTATUS(st), 0);
		traffic(i);
	}
	EQ(count_maps(""), maps);
	pair_close(&p);
}

static void t_fork_exit(void)
{
	fork_case(EXITS);
}

static void t_fork_exec(void)
{
	fork_case(EXECS);
}

static void t_fork_touch(void)
{
	fork_case(WRITES);
}

static void t_fork_open(void)
{
	fork_case(OPENS);
}

static const struct test_case cases[] = {
	{"churn", t_churn},
	{"churn-open", t_churn_open},
	{"close-with-all", t_close_with_all},
	{"wrong-order", t_wrong_order},
	{"nomem", t_nomem},
	{"nomem-open", t_nomem_open},
	{"no-alloc", t_no_alloc},
	{"fork-exit", t_fork_exit},
	{"fork-exec", t_fork_exec},
	{"fork-touch", t_fork_touch},
	{"fork-open", t_fork_open},
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, ARRAY_SIZE(cases), 600);
}

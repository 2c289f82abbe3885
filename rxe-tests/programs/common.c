/* SPDX-License-Identifier: MIT */
#include "common.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/utsname.h>

void test_fail(const char *file, int line, const char *fmt, ...)
{
	int saved = errno;
	va_list ap;

	fflush(stdout);
	flockfile(stderr);
	fprintf(stderr, "FAILED %s:%d: ", file, line);
	errno = saved;
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	fflush(stderr);
	_exit(1);
}

void test_skip(const char *fmt, ...)
{
	va_list ap;

	printf("SKIPPED: ");
	va_start(ap, fmt);
	vprintf(fmt, ap);
	va_end(ap);
	putchar('\n');
	fflush(stdout);
	_exit(77);
}

static void on_alarm(int sig)
{
	static const char text[] = "FAILED: time limit reached\n";

	(void)sig;
	if (write(2, text, sizeof(text) - 1) < 0)
		_exit(125);
	_exit(124);
}

void test_limit(unsigned seconds)
{
	struct sigaction sa = {.sa_handler = on_alarm};

	sigaction(SIGALRM, &sa, NULL);
	alarm(seconds);
}

static const struct test_case *find_case(const struct test_case *cases,
					 size_t n, const char *name)
{
	size_t i;

	for (i = 0; i < n; i++)
		if (!strcmp(cases[i].name, name))
			return &cases[i];
	return NULL;
}

/* Runs one case in a child process; returns the exit status. */
static int run_forked(const struct test_case *c, unsigned seconds)
{
	pid_t pid;
	int st;

	fflush(stdout);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		test_limit(seconds);
		c->run();
		fflush(stdout);
		_exit(0);
	}
	CHECK(waitpid(pid, &st, 0) == pid);
	if (WIFSIGNALED(st))
		fprintf(stderr, "FAILED %s: killed by signal %d\n", c->name,
			WTERMSIG(st));
	st = WIFSIGNALED(st) ? 128 + WTERMSIG(st) : WEXITSTATUS(st);
	if (st != 77)
		printf("%s %s\n", st ? "failed" : "passed", c->name);
	return st;
}

int test_main(int argc, char **argv, const struct test_case *cases, size_t n,
	      unsigned seconds)
{
	int i, devices, failed = 0, skipped = 0;
	size_t k;

	setvbuf(stdout, NULL, _IOLBF, 0);
	for (i = 1; i < argc; i++)
		if (strcmp(argv[i], "all") && !find_case(cases, n, argv[i]))
			break;
	if (argc < 2 || i < argc) {
		fprintf(stderr, "usage: %s CASE... | all; cases:\n", argv[0]);
		for (k = 0; k < n; k++)
			fprintf(stderr, "  %s\n", cases[k].name);
		return 2;
	}
	if (argc == 2 && strcmp(argv[1], "all")) {
		test_limit(seconds);
		find_case(cases, n, argv[1])->run();
		printf("passed %s\n", argv[1]);
		return 0;
	}
	/* Several cases: the parent loads the providers once. */
	ibv_free_device_list(MUST(ibv_get_device_list(&devices)));
	if (!strcmp(argv[1], "all")) {
		for (k = 0; k < n; k++) {
			int st = run_forked(&cases[k], seconds);

			failed += st && st != 77;
		}
		return !!failed;
	}
	for (i = 1; i < argc; i++) {
		int st = run_forked(find_case(cases, n, argv[i]), seconds);

		skipped += st == 77;
		failed += st && st != 77;
	}
	return failed ? 1 : skipped == argc - 1 ? 77 : 0;
}

void in_child(void (*run)(void), const char *what)
{
	unsigned left = alarm(0);
	pid_t pid = fork();
	int st;

	CHECK(pid >= 0);
	alarm(left);
	if (!pid) {
		run();
		fflush(stdout);
		_exit(0);
	}
	CHECK(waitpid(pid, &st, 0) == pid);
	if (WIFSIGNALED(st))
		FAIL("%s: the process was killed by signal %d", what,
		     WTERMSIG(st));
	if (WEXITSTATUS(st))
		_exit(WEXITSTATUS(st));
}

double now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

void sleep_ms(unsigned ms)
{
	struct timespec t = {ms / 1000, ms % 1000 * 1000000L};

	nanosleep(&t, NULL);
}

static uint8_t pattern_at(size_t i, unsigned seed)
{
	return (uint8_t)(i * 7 + (i >> 8) * 13 + (i >> 16) + seed * 31 + 1);
}

void pattern(void *p, size_t n, unsigned seed)
{
	uint8_t *b = p;
	size_t i;

	for (i = 0; i < n; i++)
		b[i] = pattern_at(i, seed);
}

void check_pattern(const char *file, int line, const void *p, size_t n,
		   unsigned seed)
{
	const volatile uint8_t *b = p;
	size_t i;

	for (i = 0; i < n; i++)
		if (b[i] != pattern_at(i, seed))
			test_fail(file, line,
				  "byte %zu of %zu is %#x, not %#x (seed %u)",
				  i, n, b[i], pattern_at(i, seed), seed);
}

void check_byte(const char *file, int line, const void *p, size_t n,
		unsigned value)
{
	const volatile uint8_t *b = p;
	size_t i;

	for (i = 0; i < n; i++)
		if (b[i] != value)
			test_fail(file, line,
				  "byte %zu of %zu is %#x, not %#x: it must not be written",
				  i, n, b[i], value);
}

unsigned count_maps(const char *name_part)
{
	FILE *f = fopen("/proc/self/maps", "r");
	char line[4096];
	unsigned n = 0;

	CHECK(f);
	while (fgets(line, sizeof(line), f))
		n += !!strstr(line, name_part);
	fclose(f);
	return n;
}

unsigned count_fds(void)
{
	DIR *d = opendir("/proc/self/fd");
	unsigned n = 0;

	CHECK(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n - 3; /* ".", ".." and the directory itself */
}

unsigned long rss_kb(void)
{
	FILE *f = fopen("/proc/self/status", "r");
	char line[256];
	unsigned long kb = 0;

	CHECK(f);
	while (fgets(line, sizeof(line), f))
		if (sscanf(line, "VmRSS: %lu", &kb) == 1)
			break;
	fclose(f);
	return kb;
}

int kernel_objects(const char *dev, const char *what)
{
	char cmd[128], line[512], *save = NULL, *word;
	int n = -1;
	FILE *f;

	snprintf(cmd, sizeof(cmd), "rdma resource show %s 2>/dev/null", dev);
	f = popen(cmd, "r");
	if (!f)
		return -1;
	/* "0: rxe0: pd 1 cq 1 qp 1 cm_id 0 mr 0 ctx 0 srq 0" */
	while (fgets(line, sizeof(line), f))
		for (word = strtok_r(line, " \n", &save); word;
		     word = strtok_r(NULL, " \n", &save))
			if (!strcmp(word, what) &&
			    (word = strtok_r(NULL, " \n", &save)))
				n = atoi(word);
	pclose(f);
	return n;
}

struct ibv_context *open_device_named(const char *name)
{
	int n = 0, i;
	struct ibv_device **list = MUST(ibv_get_device_list(&n));
	struct ibv_context *ctx = NULL;
	const char *expect = getenv("RXE_EXPECT");
	Dl_info info;

	for (i = 0; i < n; i++) {
		if (name && *name && strcmp(ibv_get_device_name(list[i]), name))
			continue;
		ctx = MUST(ibv_open_device(list[i]));
		break;
	}
	ibv_free_device_list(list);
	if (!ctx)
		FAIL("no RDMA device %s among %d", name ? name : "(any)", n);
	/* The file with the data path's code is the provider; the embedded device's
	 * library hooks poll_cq. */
	if (!dladdr((void *)ctx->ops.post_recv, &info) || !info.dli_fname)
		FAIL("the file of the data path's code is unknown");
	fprintf(stderr, "provider %s\n", info.dli_fname);
	if (expect && *expect && !strstr(info.dli_fname, expect))
		FAIL("served by %s, not by %s", info.dli_fname, expect);
	return ctx;
}

struct ibv_context *open_device(void)
{
	return open_device_named(getenv("RXE_DEV"));
}

int gid_index(struct ibv_context *ctx)
{
	const char *env = getenv("RXE_GID");
	static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
	int i, any = -1;

	/* RXE_GID is the index on RXE_DEV; other devices' GIDs are searched. */
	if (env && *env && getenv("RXE_DEV") &&
	    !strcmp(getenv("RXE_DEV"), ibv_get_device_name(ctx->device)))
		return atoi(env);
	for (i = 0; i < 16; i++) {
		union ibv_gid gid, zero = {};

		if (ibv_query_gid(ctx, 1, i, &gid) ||
		    !memcmp(&gid, &zero, sizeof(gid)))
			continue;
		if (!memcmp(gid.raw, mapped, sizeof(mapped)))
			return i;
		any = i;
	}
	if (any < 0)
		FAIL("no GID on %s", ibv_get_device_name(ctx->device));
	return any;
}

uint64_t device_caps_ex(struct ibv_context *ctx)
{
	struct ibv_device_attr_ex attr = {};

	OK(ibv_query_device_ex(ctx, NULL, &attr));
	return attr.device_cap_flags_ex;
}

static unsigned or_default(unsigned value, unsigned def)
{
	return value ? value : def;
}

uint64_t all_send_ops(enum ibv_qp_type type, uint64_t caps)
{
	uint64_t ops = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;

	if (type == IBV_QPT_UD)
		return ops;
	ops |= IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM |
	       IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_SEND_WITH_INV;
	if (type == IBV_QPT_UC)
		return ops;
	ops |= IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
	       IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | IBV_QP_EX_WITH_LOCAL_INV;
#ifdef HAVE_WR_ATOMIC_WRITE
	if (caps & CAP_ATOMIC_WRITE)
		ops |= IBV_QP_EX_WITH_ATOMIC_WRITE;
#endif
#ifdef HAVE_WR_FLUSH
	if (caps & (CAP_FLUSH_GLOBAL | CAP_FLUSH_PERSISTENT))
		ops |= IBV_QP_EX_WITH_FLUSH;
#endif
	(void)caps;
	return ops;
}

#define MR_ACCESS                                                              \
	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |                    \
	 IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |                   \
	 IBV_ACCESS_MW_BIND)

void end_open(struct end *e, struct ibv_context *ctx, struct ibv_pd *pd,
	      const struct pair_opts *o, bool srq)
{
	memset(e, 0, sizeof(*e));
	e->ctx = ctx;
	e->pd = pd;
	e->type = o->type;
	e->size = o->size ? o->size : 1 << 20;
	e->buf = mmap(NULL, e->size, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(e->buf != MAP_FAILED);
	memset(e->buf, 0xee, e->size);
	e->mr = MUST(ibv_reg_mr(pd, e->buf, e->size, MR_ACCESS | o->mr_access));
	if (o->events)
		e->ch = MUST(ibv_create_comp_channel(ctx));
	if (o->cq_ex) {
		struct ibv_cq_init_attr_ex attr = {
			.cqe = or_default(o->cqe, 256),
			.cq_context = e,
			.channel = e->ch,
			.wc_flags = IBV_WC_EX_WITH_BYTE_LEN |
				    IBV_WC_EX_WITH_IMM |
				    IBV_WC_EX_WITH_QP_NUM |
				    IBV_WC_EX_WITH_SRC_QP,
		};

		e->cqx = MUST(ibv_create_cq_ex(ctx, &attr));
		e->cq = ibv_cq_ex_to_cq(e->cqx);
	} else {
		e->cq = MUST(ibv_create_cq(ctx, or_default(o->cqe, 256), e,
					   e->ch, 0));
	}
	if (srq) {
		struct ibv_srq_init_attr attr = {
			.srq_context = e,
			.attr = {.max_wr = or_default(o->wr, 64),
				 .max_sge = or_default(o->sge, 4)},
		};

		e->srq = MUST(ibv_create_srq(pd, &attr));
	}
	struct ibv_qp_cap cap = {
		.max_send_wr = or_default(o->wr, 64),
		.max_recv_wr = or_default(o->wr, 64),
		.max_send_sge = or_default(o->sge, 4),
		.max_recv_sge = or_default(o->sge, 4),
		.max_inline_data = o->inl,
	};
	if (o->api == POST) {
		struct ibv_qp_init_attr attr = {
			.qp_context = e,
			.send_cq = e->cq,
			.recv_cq = e->cq,
			.srq = e->srq,
			.cap = cap,
			.qp_type = o->type,
			.sq_sig_all = o->sig_all,
		};

		e->qp = MUST(ibv_create_qp(pd, &attr));
	} else {
		struct ibv_qp_init_attr_ex attr = {
			.qp_context = e,
			.send_cq = e->cq,
			.recv_cq = e->cq,
			.srq = e->srq,
			.cap = cap,
			.qp_type = o->type,
			.sq_sig_all = o->sig_all,
			.comp_mask = IBV_QP_INIT_ATTR_PD |
				     IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
			.pd = pd,
			.send_ops_flags =
				all_send_ops(o->type, device_caps_ex(ctx)),
		};

		e->qp = MUST(ibv_create_qp_ex(ctx, &attr));
		e->qpx = MUST(ibv_qp_to_qp_ex(e->qp));
	}
}

void end_connect(struct end *e, const struct pair_opts *o, uint32_t peer_qpn,
		 const union ibv_gid *peer_gid)
{
	struct ibv_port_attr port;
	struct ibv_ah_attr ah = {
		.is_global = 1,
		.port_num = 1,
		.grh = {.dgid = *peer_gid,
			.sgid_index = gid_index(e->ctx),
			.hop_limit = 64},
	};
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qkey = QKEY,
		.qp_access_flags = (MR_ACCESS | o->mr_access) &
				   ~IBV_ACCESS_LOCAL_WRITE & ~IBV_ACCESS_MW_BIND,
	};
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;

	e->peer_qpn = peer_qpn;
	OK(ibv_query_port(e->ctx, 1, &port));
	if (port.link_layer == IBV_LINK_LAYER_INFINIBAND)
		ah.dlid = port.lid; /* the peer is on the same port */
	mask |= o->type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
	OK(ibv_modify_qp(e->qp, &attr, mask));

	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR,
		.ah_attr = ah,
		.path_mtu = port.active_mtu,
		.dest_qp_num = peer_qpn,
		.rq_psn = 0x1234,
		.max_dest_rd_atomic = 16,
		.min_rnr_timer = or_default(o->min_rnr, 12),
	};
	mask = IBV_QP_STATE;
	if (o->type != IBV_QPT_UD)
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			IBV_QP_RQ_PSN;
	if (o->type == IBV_QPT_RC)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	OK(ibv_modify_qp(e->qp, &attr, mask));

	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS,
		.sq_psn = 0x1234,
		.timeout = or_default(o->timeout, 14),
		.retry_cnt = o->no_retry ? 0 : or_default(o->retry, 7),
		.rnr_retry = o->no_rnr_retry ? 0 : or_default(o->rnr_retry, 7),
		.max_rd_atomic = 16,
	};
	mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	if (o->type == IBV_QPT_RC)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			IBV_QP_MAX_QP_RD_ATOMIC;
	OK(ibv_modify_qp(e->qp, &attr, mask));
	if (o->type == IBV_QPT_UD)
		e->ah = MUST(ibv_create_ah(e->pd, &ah));
}

void end_close(struct end *e)
{
	if (e->ah)
		OK(ibv_destroy_ah(e->ah));
	OK(ibv_destroy_qp(e->qp));
	if (e->srq)
		OK(ibv_destroy_srq(e->srq));
	OK(ibv_destroy_cq(e->cq));
	if (e->ch)
		OK(ibv_destroy_comp_channel(e->ch));
	OK(ibv_dereg_mr(e->mr));
	CHECK(!munmap(e->buf, e->size));
	memset(e, 0, sizeof(*e));
}

void pair_open_on(struct pair *p, struct ibv_context *ctx, struct pair_opts o)
{
	union ibv_gid gid;
	struct ibv_port_attr port;

	memset(p, 0, sizeof(*p));
	p->o = o;
	p->ctx = ctx;
	p->pd = MUST(ibv_alloc_pd(ctx));
	OK(ibv_query_port(ctx, 1, &port));
	p->mtu = 128u << port.active_mtu;
	OK(ibv_query_gid(ctx, 1, gid_index(ctx), &gid));
	end_open(&p->a, ctx, p->pd, &o, false);
	end_open(&p->b, ctx, p->pd, &o, o.srq);
	if (o.unconnected)
		return;
	end_connect(&p->a, &o, p->b.qp->qp_num, &gid);
	end_connect(&p->b, &o, p->a.qp->qp_num, &gid);
}

void pair_open(struct pair *p, struct pair_opts o)
{
	pair_open_on(p, open_device(), o);
}

void pair_close(struct pair *p)
{
	end_close(&p->a);
	end_close(&p->b);
	OK(ibv_dealloc_pd(p->pd));
	OK(ibv_close_device(p->ctx));
}

void qp_to(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = {.qp_state = state};

	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
}

enum ibv_qp_state qp_state(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;

	OK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
	return attr.qp_state;
}

struct ibv_sge sge_on(struct end *e, size_t off, uint32_t len)
{
	CHECK(off + len <= e->size);
	return (struct ibv_sge){(uintptr_t)e->buf + off, len, e->mr->lkey};
}

struct op op_on(struct end *e, enum ibv_wr_opcode opcode, uint64_t wr_id,
		size_t off, uint32_t len)
{
	struct op op = {
		.opcode = opcode,
		.flags = IBV_SEND_SIGNALED,
		.wr_id = wr_id,
		.nsge = 1,
	};

	op.sge[0] = sge_on(e, off, len);
	return op;
}

static int post_by_list(struct end *e, const struct op *ops, int n, int *posted)
{
	struct ibv_send_wr *wr = MUST(calloc(n ? n : 1, sizeof(*wr)));
	/* Not in the list: detects that bad_wr was not written. */
	struct ibv_send_wr poison, *bad = &poison;
	int i, rc;

	for (i = 0; i < n; i++) {
		const struct op *o = &ops[i];

		wr[i].wr_id = o->wr_id;
		wr[i].next = i + 1 < n ? &wr[i + 1] : NULL;
		wr[i].sg_list = (struct ibv_sge *)o->sge;
		wr[i].num_sge = o->nsge;
		wr[i].opcode = o->opcode;
		wr[i].send_flags = o->flags;
		wr[i].imm_data = o->imm;
		switch (o->opcode) {
		case IBV_WR_SEND_WITH_INV:
		case IBV_WR_LOCAL_INV:
			wr[i].invalidate_rkey = o->inv_rkey;
			break;
		case IBV_WR_ATOMIC_CMP_AND_SWP:
		case IBV_WR_ATOMIC_FETCH_AND_ADD:
			wr[i].wr.atomic.remote_addr = o->remote;
			wr[i].wr.atomic.rkey = o->rkey;
			wr[i].wr.atomic.compare_add = o->compare_add;
			wr[i].wr.atomic.swap = o->swap;
			break;
		case IBV_WR_BIND_MW:
			wr[i].bind_mw.mw = o->mw;
			wr[i].bind_mw.rkey = o->mw_rkey;
			wr[i].bind_mw.bind_info = o->bind;
			break;
		default:
			wr[i].wr.rdma.remote_addr = o->remote;
			wr[i].wr.rdma.rkey = o->rkey;
			break;
		}
		if (e->type == IBV_QPT_UD) {
			wr[i].wr.ud.ah = e->ah;
			wr[i].wr.ud.remote_qpn = e->peer_qpn;
			wr[i].wr.ud.remote_qkey = QKEY;
		}
	}
	rc = ibv_post_send(e->qp, n ? wr : NULL, &bad);
	if (posted)
		*posted = n;
	if (rc && n) {
		if (bad < wr || bad >= wr + n)
			FAIL("ibv_post_send returned %d with bad_wr outside of the list",
			     rc);
		if (posted)
			*posted = bad - wr;
	}
	free(wr);
	return rc;
}

static void build_op(struct end *e, const struct op *o)
{
	struct ibv_qp_ex *q = e->qpx;
	struct ibv_data_buf bufs[32];
	int i;

	q->wr_id = o->wr_id;
	q->wr_flags = o->flags;
	if (o->no_inline_flag)
		q->wr_flags &= ~IBV_SEND_INLINE;
	switch (o->opcode) {
	case IBV_WR_SEND:
		ibv_wr_send(q);
		break;
	case IBV_WR_SEND_WITH_IMM:
		ibv_wr_send_imm(q, o->imm);
		break;
	case IBV_WR_SEND_WITH_INV:
		ibv_wr_send_inv(q, o->inv_rkey);
		break;
	case IBV_WR_RDMA_WRITE:
		ibv_wr_rdma_write(q, o->rkey, o->remote);
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		ibv_wr_rdma_write_imm(q, o->rkey, o->remote, o->imm);
		break;
	case IBV_WR_RDMA_READ:
		ibv_wr_rdma_read(q, o->rkey, o->remote);
		break;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		ibv_wr_atomic_cmp_swp(q, o->rkey, o->remote, o->compare_add,
				      o->swap);
		break;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		ibv_wr_atomic_fetch_add(q, o->rkey, o->remote, o->compare_add);
		break;
#ifdef HAVE_WR_ATOMIC_WRITE
	case IBV_WR_ATOMIC_WRITE:
		ibv_wr_atomic_write(q, o->rkey, o->remote, o->value);
		return;
#endif
#ifdef HAVE_WR_FLUSH
	case IBV_WR_FLUSH:
		ibv_wr_flush(q, o->rkey, o->remote, o->flush_len, o->flush_type,
			     o->flush_level);
		return;
#endif
	case IBV_WR_BIND_MW:
		ibv_wr_bind_mw(q, o->mw, o->mw_rkey, &o->bind);
		return;
	case IBV_WR_LOCAL_INV:
		ibv_wr_local_inv(q, o->inv_rkey);
		return;
	default:
		FAIL("unknown operation %d", o->opcode);
	}
	if (e->type == IBV_QPT_UD)
		ibv_wr_set_ud_addr(q, e->ah, e->peer_qpn, QKEY);
	if (o->flags & IBV_SEND_INLINE) {
		for (i = 0; i < o->nsge; i++)
			bufs[i] = (struct ibv_data_buf){
				(void *)(uintptr_t)o->sge[i].addr,
				o->sge[i].length};
		if (o->nsge == 1 && !o->list)
			ibv_wr_set_inline_data(q, bufs[0].addr, bufs[0].length);
		else
			ibv_wr_set_inline_data_list(q, o->nsge, bufs);
	} else if (o->nsge == 1 && !o->list) {
		ibv_wr_set_sge(q, o->sge[0].lkey, o->sge[0].addr,
			       o->sge[0].length);
	} else {
		ibv_wr_set_sge_list(q, o->nsge, o->sge);
	}
}

int post_ops(struct end *e, const struct op *ops, int n, enum api api,
	     int *posted)
{
	int i, rc;

	if (api == POST)
		return post_by_list(e, ops, n, posted);
	ibv_wr_start(e->qpx);
	for (i = 0; i < n; i++)
		build_op(e, &ops[i]);
	rc = ibv_wr_complete(e->qpx);
	if (posted)
		*posted = rc ? 0 : n;
	return rc;
}

int try_recv(struct end *e, uint64_t wr_id, const struct ibv_sge *sge, int n)
{
	struct ibv_recv_wr wr = {.wr_id = wr_id,
				 .sg_list = (struct ibv_sge *)sge,
				 .num_sge = n};
	struct ibv_recv_wr *bad = NULL;
	int rc = e->srq ? ibv_post_srq_recv(e->srq, &wr, &bad) :
			  ibv_post_recv(e->qp, &wr, &bad);

	if (rc && bad != &wr)
		FAIL("receive refused with %d, bad_wr is %p, not %p", rc, bad,
		     &wr);
	return rc;
}

void post_recv(struct end *e, uint64_t wr_id, size_t off, uint32_t len)
{
	struct ibv_sge sge = sge_on(e, off, len);

	OK(try_recv(e, wr_id, &sge, 1));
}

bool poll_wait(struct ibv_cq *cq, struct ibv_wc *wc, unsigned ms)
{
	double end = now_ms() + ms;
	int spins = 0;

	for (;;) {
		int n;

		memset(wc, 0xa5, sizeof(*wc));
		n = ibv_poll_cq(cq, 1, wc);
		if (n == 1)
			return true;
		EQ(n, 0);
		if (now_ms() > end)
			return false;
		/* A software device needs the processor. */
		if (++spins > 20)
			sleep_ms(1);
		else
			sched_yield();
	}
}

struct ibv_wc poll_one(const char *file, int line, struct ibv_cq *cq)
{
	struct ibv_wc wc;

	if (!poll_wait(cq, &wc, 10000))
		test_fail(file, line, "no completion within 10 s");
	return wc;
}

void poll_none(const char *file, int line, struct ibv_cq *cq, unsigned ms)
{
	struct ibv_wc wc;

	if (poll_wait(cq, &wc, ms))
		test_fail(file, line,
			  "unexpected completion: wr_id %#" PRIx64
			  " status %d (%s) opcode %d",
			  wc.wr_id, wc.status, ibv_wc_status_str(wc.status),
			  wc.opcode);
}

#define FIELD(name, got, want)                                                 \
	do {                                                                   \
		unsigned long long g_ = (got), w_ = (want);                    \
		if (g_ != w_)                                                  \
			test_fail(file, line,                                  \
				  "completion %#" PRIx64                       \
				  ": %s is %#llx, not %#llx",                  \
				  wc->wr_id, name, g_, w_);                    \
	} while (0)

void check_wc(const char *file, int line, const struct ibv_wc *wc,
	      uint64_t wr_id, enum ibv_wc_opcode opcode, uint32_t byte_len,
	      uint32_t qp_num, uint32_t src_qp, unsigned flags, uint32_t imm)
{
	if (wc->status != IBV_WC_SUCCESS)
		test_fail(file, line, "completion %#" PRIx64 ": status %d (%s)",
			  wc->wr_id, wc->status, ibv_wc_status_str(wc->status));
	FIELD("wr_id", wc->wr_id, wr_id);
	FIELD("opcode", wc->opcode, opcode);
	FIELD("byte_len", wc->byte_len, byte_len);
	FIELD("qp_num", wc->qp_num, qp_num);
	FIELD("src_qp", wc->src_qp, src_qp);
	FIELD("wc_flags", wc->wc_flags & ~IBV_WC_GRH, flags);
	if (flags & IBV_WC_WITH_IMM && wc->opcode & IBV_WC_RECV)
		FIELD("imm_data", wc->imm_data, imm);
	FIELD("vendor_err", wc->vendor_err, 0);
	FIELD("pkey_index", wc->pkey_index, 0);
	FIELD("slid", wc->slid, 0);
	FIELD("sl", wc->sl, 0);
	FIELD("dlid_path_bits", wc->dlid_path_bits, 0);
}

void check_status(const char *file, int line, const struct ibv_wc *wc,
		  uint64_t wr_id, unsigned allowed, uint32_t qp_num)
{
	char names[200] = "";
	unsigned i;

	if (wc->status > 31 || !(allowed & 1u << wc->status)) {
		for (i = 0; i < 32; i++)
			if (allowed & 1u << i)
				snprintf(names + strlen(names),
					 sizeof(names) - strlen(names),
					 " %d (%s)", i, ibv_wc_status_str(i));
		test_fail(file, line,
			  "completion %#" PRIx64 ": status is %d (%s), not%s",
			  wc->wr_id, wc->status, ibv_wc_status_str(wc->status),
			  names);
	}
	FIELD("wr_id", wc->wr_id, wr_id);
	FIELD("qp_num", wc->qp_num, qp_num);
}

enum ibv_wc_opcode wc_opcode_of(enum ibv_wr_opcode op)
{
	switch (op) {
	case IBV_WR_RDMA_WRITE:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		return IBV_WC_RDMA_WRITE;
	case IBV_WR_RDMA_READ:
		return IBV_WC_RDMA_READ;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		return IBV_WC_COMP_SWAP;
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		return IBV_WC_FETCH_ADD;
	case IBV_WR_BIND_MW:
		return IBV_WC_BIND_MW;
	case IBV_WR_LOCAL_INV:
		return IBV_WC_LOCAL_INV;
#ifdef HAVE_WR_ATOMIC_WRITE
	case IBV_WR_ATOMIC_WRITE:
		return IBV_WC_ATOMIC_WRITE;
#endif
#ifdef HAVE_WR_FLUSH
	case IBV_WR_FLUSH:
		return IBV_WC_FLUSH;
#endif
	default:
		return IBV_WC_SEND;
	}
}

bool fd_readable(int fd, unsigned ms)
{
	struct pollfd p = {.fd = fd, .events = POLLIN};
	int n = poll(&p, 1, ms);

	CHECK(n >= 0);
	return n == 1;
}

bool wait_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **context,
		unsigned ms)
{
	struct ibv_cq *got = NULL;
	void *ctx = NULL;

	if (!fd_readable(ch->fd, ms))
		return false;
	CHECK(!ibv_get_cq_event(ch, &got, &ctx));
	ibv_ack_cq_events(got, 1);
	if (cq)
		*cq = got;
	if (context)
		*context = ctx;
	return true;
}

bool wait_async(struct ibv_context *ctx, struct ibv_async_event *ev,
		unsigned ms)
{
	if (!fd_readable(ctx->async_fd, ms))
		return false;
	CHECK(!ibv_get_async_event(ctx, ev));
	return true;
}

bool kernel_at_least(int major, int minor)
{
	struct utsname u;
	int a = 0, b = 0;

	uname(&u);
	sscanf(u.release, "%d.%d", &a, &b);
	return a > major || (a == major && b >= minor);
}

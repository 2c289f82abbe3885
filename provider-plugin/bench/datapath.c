/* SPDX-License-Identifier: MIT */
/*
 * The data-path bench: one provider, in one process, on rings that the bench
 * itself fills and drains. Only public verbs are used; the provider is the one
 * that libibverbs chooses (RDMAV_DRIVERS), the kernel is standin.c, preloaded.
 *
 *   datapath time [samples]   nanoseconds of an operation, median of samples
 *   datapath count            exact instructions, locked operations and fences
 *   datapath trace ROW        each counted instruction of one round of calls:
 *                             its address in its file, and the file
 *
 * Output, one fact a line:
 *   provider PATH             the file that holds the provider's poll_cq
 *   thread-domain yes|no      whether the provider gave a parent domain with a
 *                             thread domain (else single-* rows of QPs are on
 *                             the plain protection domain)
 *   doorbell NS               the stand-in's write, already subtracted below
 *   time ROW NS
 *   count ROW INSTRUCTIONS LOCKED FENCES
 *
 * A figure is of one operation (one entry of a batch). Time: 64 rounds are timed
 * together; in a round the device acts once (one store of an index) and the
 * row's calls follow, as many as the ring holds. The same loop around nothing,
 * and where the call rings the doorbell the stand-in's write, are measured alone
 * and subtracted. Counts: see stepper.h; the same empty loop is subtracted and
 * the stand-in's instructions are left out by address. Run with LD_BIND_NOW=1,
 * so that no call resolves a symbol.
 *
 * Each row is checked first: what the device put in a completion must come out,
 * and what was posted must be in the entry.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "rows.h"
#include "standin.h"
#include "stepper.h"

#define ROUNDS 64
#define DEFAULT_SAMPLES 101
#define MAX_SAMPLES 10001
#define STANDIN_NAME "standin.so"

static void die(const char *fmt, ...)
{
	va_list args;

	fprintf(stderr, "datapath: ");
	va_start(args, fmt);
	vfprintf(stderr, fmt, args);
	va_end(args);
	fputc('\n', stderr);
	exit(1);
}

/* ---- set up ---- */

static standin_queue_fn find_queue;
static standin_doorbells_fn doorbells;

static struct rxe_queue_buf *ring(enum standin_queue_kind kind, uint32_t handle)
{
	struct rxe_queue_buf *buf = find_queue(kind, handle);

	if (!buf)
		die("the provider made no queue of kind %d for handle %u", kind,
		    handle);
	return buf;
}

static void to_ready(struct ibv_qp *qp)
{
	static const enum ibv_qp_state path[] = { IBV_QPS_INIT, IBV_QPS_RTR,
						  IBV_QPS_RTS };

	for (unsigned int i = 0; i < 3; i++) {
		struct ibv_qp_attr attr = { .qp_state = path[i] };
		int err = ibv_modify_qp(qp, &attr, IBV_QP_STATE);

		if (err)
			die("ibv_modify_qp to state %d: %s", path[i],
			    strerror(err));
	}
}

static struct ibv_cq_ex *make_cqx(struct bench *b, bool single)
{
	struct ibv_cq_init_attr_ex attr = {
		.cqe = CQ_ENTRIES,
		.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM |
			    IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_SRC_QP,
		.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
		.flags = single ? IBV_CREATE_CQ_ATTR_SINGLE_THREADED : 0,
	};
	struct ibv_cq_ex *cq = ibv_create_cq_ex(b->context, &attr);

	if (!cq)
		die("ibv_create_cq_ex: %s", strerror(errno));
	return cq;
}

static void make_queues(struct bench *b, struct queues *q, bool single)
{
	struct ibv_pd *pd = b->pd;
	struct ibv_qp_cap cap = {
		.max_send_wr = SQ_ENTRIES, .max_recv_wr = RQ_ENTRIES,
		.max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64,
	};
	struct ibv_qp_init_attr_ex attr = {
		.cap = cap, .qp_type = IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD |
			     IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	struct ibv_qp_init_attr plain = { .cap = cap, .qp_type = IBV_QPT_RC };
	struct ibv_qp *qpx;

	q->cqx = make_cqx(b, single);
	if (single) {
		struct ibv_td_init_attr td_attr = {};
		struct ibv_td *td = ibv_alloc_td(b->context, &td_attr);
		struct ibv_parent_domain_init_attr pd_attr = { .pd = b->pd,
							       .td = td };
		struct ibv_pd *domain =
			td ? ibv_alloc_parent_domain(b->context, &pd_attr) :
			     NULL;

		q->cq = ibv_cq_ex_to_cq(make_cqx(b, true));
		q->thread_domain = domain != NULL;
		if (domain)
			pd = domain;
	} else {
		q->cq = ibv_create_cq(b->context, CQ_ENTRIES, NULL, NULL, 0);
		if (!q->cq)
			die("ibv_create_cq: %s", strerror(errno));
	}
	plain.send_cq = plain.recv_cq = q->cq;
	q->qp = ibv_create_qp(pd, &plain);
	if (!q->qp)
		die("ibv_create_qp: %s", strerror(errno));
	attr.pd = pd;
	attr.send_cq = attr.recv_cq = q->cq;
	qpx = ibv_create_qp_ex(b->context, &attr);
	if (!qpx)
		die("ibv_create_qp_ex: %s", strerror(errno));
	q->qpx = ibv_qp_to_qp_ex(qpx);
	if (!q->qpx)
		die("ibv_qp_to_qp_ex gave nothing");
	to_ready(q->qp);
	to_ready(qpx);

	q->cq_ring = ring(STANDIN_CQ, q->cq->handle);
	q->cqx_ring = ring(STANDIN_CQ, q->cqx->handle);
	q->sq_ring = ring(STANDIN_SQ, q->qp->handle);
	q->rq_ring = ring(STANDIN_RQ, q->qp->handle);
	q->sqx_ring = ring(STANDIN_SQ, qpx->handle);
	fill_completions(q->cq_ring);
	fill_completions(q->cqx_ring);
}

static void make_requests(struct bench *b)
{
	for (unsigned int i = 0; i < BATCH; i++) {
		struct ibv_send_wr *next_send =
			i + 1 < BATCH ? &b->send[i + 1] : NULL;

		b->sge[i] = (struct ibv_sge){
			.addr = (uintptr_t)b->buffer,
			.length = INLINE_LENGTH, .lkey = b->mr->lkey,
		};
		b->send[i] = (struct ibv_send_wr){
			.wr_id = i, .sg_list = &b->sge[i], .num_sge = 1,
			.opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED,
			.next = next_send,
		};
		b->send_inline[i] = b->send[i];
		b->send_inline[i].send_flags |= IBV_SEND_INLINE;
		if (next_send)
			b->send_inline[i].next = &b->send_inline[i + 1];
		b->recv[i] = (struct ibv_recv_wr){
			.wr_id = i, .sg_list = &b->sge[i], .num_sge = 1,
			.next = i + 1 < BATCH ? &b->recv[i + 1] : NULL,
		};
	}
}

/* The file of the provider: where the context's own poll_cq is. */
static const char *provider_of(struct ibv_context *context)
{
	Dl_info info;

	if (!dladdr((void *)(uintptr_t)context->ops.poll_cq, &info))
		die("poll_cq is in no loaded file");
	return info.dli_fname;
}

/* Uses the queues of several threads, long enough to be taken for their owner. */
static void *use_queues(void *arg)
{
	struct bench *b = arg;

	for (unsigned int i = 0; i < nrows; i++) {
		const struct row *row = &rows[i];
		struct queues *q = row_queues(b, row);

		if (row->users != SEVERAL)
			continue;
		for (unsigned int r = 0; r < 64; r++) {
			device_act(q, row);
			row->run(b, q, row->calls);
		}
		device_act(q, row);
		while (ibv_poll_cq(q->cq, BATCH, b->wc) > 0)
			;
	}
	return NULL;
}

static void another_thread(struct bench *b)
{
	pthread_t thread;

	if (pthread_create(&thread, NULL, use_queues, b) ||
	    pthread_join(thread, NULL))
		die("no second thread");
}

static void set_up(struct bench *b)
{
	struct ibv_device **list;
	int n;

	rows_init();
	find_queue = (standin_queue_fn)(uintptr_t)dlsym(RTLD_DEFAULT,
							"standin_queue");
	doorbells = (standin_doorbells_fn)(uintptr_t)dlsym(RTLD_DEFAULT,
							   "standin_doorbells");
	if (!find_queue || !doorbells)
		die("preload " STANDIN_NAME " (LD_PRELOAD)");
	list = ibv_get_device_list(&n);
	if (!list || n < 1)
		die("no device: SYSFS_PATH must name the stand-in's tree");
	b->context = ibv_open_device(list[0]);
	if (!b->context)
		die("ibv_open_device: %s", strerror(errno));
	ibv_free_device_list(list);
	b->pd = ibv_alloc_pd(b->context);
	if (!b->pd)
		die("ibv_alloc_pd: %s", strerror(errno));
	if (posix_memalign((void **)&b->buffer, 4096, 4096))
		die("out of memory");
	memset(b->buffer, 0x5a, 4096);
	b->mr = ibv_reg_mr(b->pd, b->buffer, 4096, IBV_ACCESS_LOCAL_WRITE);
	if (!b->mr)
		die("ibv_reg_mr: %s", strerror(errno));
	make_requests(b);
	make_queues(b, &b->sets[ANY], false);
	make_queues(b, &b->sets[SINGLE], true);
	make_queues(b, &b->sets[SEVERAL], false);
	another_thread(b);
	printf("provider %s\n", provider_of(b->context));
	printf("thread-domain %s\n", b->sets[SINGLE].thread_domain ? "yes" : "no");
}

static void check_rows(struct bench *b)
{
	for (unsigned int i = 0; i < nrows; i++) {
		const struct row *row = &rows[i];
		struct queues *q = row_queues(b, row);
		uint64_t rung = doorbells();
		const char *wrong;

		if (!row->check)
			continue;
		device_act(q, row);
		wrong = row->check(b, q, row);
		if (!wrong && doorbells() - rung != row->doorbell)
			wrong = "the call did not ring exactly one doorbell";
		if (wrong)
			die("row %s: %s", row->name, wrong);
		if (row->device == DEVICE_FILLS_CQ) {
			/* leave the ring empty for the empty poll */
			while (ibv_poll_cq(q->cq, BATCH, b->wc) > 0)
				;
		}
	}
}

/* ---- time ---- */

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

typedef void (*run_fn)(struct bench *, struct queues *, unsigned int);

/* Median time of one call. */
static double median_call(struct bench *b, const struct row *row, run_fn run,
			  unsigned int samples)
{
	static double times[MAX_SAMPLES];
	struct queues *q = row_queues(b, row);

	for (unsigned int s = 0; s < samples; s++) {
		double start = now_ns();

		for (unsigned int r = 0; r < ROUNDS; r++) {
			device_act(q, row);
			run(b, q, row->calls);
		}
		times[s] = (now_ns() - start) / (ROUNDS * row->calls);
	}
	qsort(times, samples, sizeof(times[0]), by_value);
	return times[samples / 2];
}

static void time_rows(struct bench *b, unsigned int samples)
{
	for (unsigned int i = 0; i < nrows; i++) {
		const struct row *row = &rows[i];
		/* Without the device's act, which nothing and the doorbell
		 * do not need: the row keeps that one store. */
		struct row bare = *row;
		double nothing, call, bell = 0;

		bare.device = DEVICE_NOTHING;
		device_act(row_queues(b, row), row);
		row->run(b, row_queues(b, row), row->calls);
		nothing = median_call(b, &bare, run_nothing, samples);
		if (row->doorbell)
			bell = median_call(b, &bare, run_doorbell, samples) -
			       nothing;
		call = median_call(b, row, row->run, samples);
		printf("time %s %.4f\n", row->name,
		       (call - nothing - bell) / row->batch);
		if (!strcmp(row->name, "send/1"))
			printf("doorbell %.4f\n", bell);
	}
}

/* ---- count ---- */

static void marked(struct bench *b, const struct row *row, run_fn run)
{
	struct queues *q = row_queues(b, row);

	STEP_MARK();
	run(b, q, row->calls);
	STEP_MARK();
}

static void stepped_child(struct bench *b, const char *only)
{
	if (ptrace(PTRACE_TRACEME, 0, NULL, NULL))
		die("ptrace: %s", strerror(errno));
	raise(SIGSTOP);
	set_up(b);
	check_rows(b);
	fflush(stdout);
	for (unsigned int i = 0; i < nrows; i++) {
		const struct row *row = &rows[i];

		if (only && strcmp(only, row->name))
			continue;
		device_act(row_queues(b, row), row);
		row->run(b, row_queues(b, row), row->calls);
		device_act(row_queues(b, row), row);
		marked(b, row, run_nothing);
		marked(b, row, row->run);
	}
	_exit(0);
}

static void count_rows(struct bench *b, const char *only)
{
	pid_t child = fork();
	int status;

	if (child < 0)
		die("fork: %s", strerror(errno));
	if (child == 0)
		stepped_child(b, only);
	if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
		die("the stepped process did not start");
	for (unsigned int i = 0; i < nrows; i++) {
		const struct row *row = &rows[i];
		double operations = (double)row->calls * row->batch;
		struct step_counts empty, full;

		if (only && strcmp(only, row->name))
			continue;
		if (!step_count(child, STANDIN_NAME, false, &empty) ||
		    !step_count(child, STANDIN_NAME, only != NULL, &full))
			die("row %s: the stepped process ended early",
			    row->name);
		printf("count %s %.3f %.3f %.3f\n", row->name,
		       (full.instructions - empty.instructions) / operations,
		       full.locked / operations, full.fences / operations);
	}
	ptrace(PTRACE_DETACH, child, NULL, NULL);
	waitpid(child, &status, 0);
}

/* ---- main ---- */

/* One CPU for the whole run; which one does not matter. */
static void stay_here(void)
{
	cpu_set_t set;
	int cpu = sched_getcpu();

	if (cpu < 0)
		return;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	sched_setaffinity(0, sizeof(set), &set);
}

int main(int argc, char **argv)
{
	static struct bench b;
	const char *mode = argc > 1 ? argv[1] : "";

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(mode, "time")) {
		long samples = argc > 2 ? atol(argv[2]) : DEFAULT_SAMPLES;

		if (samples < 1 || samples > MAX_SAMPLES)
			die("samples must be 1 to %d", MAX_SAMPLES);
		stay_here();
		set_up(&b);
		check_rows(&b);
		time_rows(&b, samples);
	} else if (!strcmp(mode, "count")) {
		count_rows(&b, NULL);
	} else if (!strcmp(mode, "trace") && argc > 2) {
		count_rows(&b, argv[2]);
	} else {
		die("usage: datapath time [SAMPLES] | count | trace ROW");
	}
	return 0;
}

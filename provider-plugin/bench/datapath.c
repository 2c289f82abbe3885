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
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "rows.h"
#include "standin.h"

#define PROGRAM "datapath"
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

#include "datapath_common.c"

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

static void make_queues(struct bench *b, struct queues *q, bool single)
{
	struct ibv_pd *pd = make_cqs(b, q, single);
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
	make_memory(b);
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

static void prepare(struct bench *b, const struct row *row)
{
	device_act(row_queues(b, row), row);
}

static void clean_up(struct bench *b, const struct row *row)
{
	(void)b;
	(void)row;
}

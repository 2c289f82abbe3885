/* SPDX-License-Identifier: MIT */
/*
 * The data-path bench on ConnectX's queues: one provider, in one process, on
 * mlx5_standin.c, the device played by the program. As datapath.c for rdma_rxe.
 *
 *   mlx5_datapath time [samples]   nanoseconds of an operation, median of samples
 *   mlx5_datapath count            exact instructions, locked operations, fences
 *   mlx5_datapath trace ROW        each counted instruction of one round
 *
 * Output, one fact a line:
 *   provider PATH
 *   thread-domain yes|no
 *   time ROW NS
 *   count ROW INSTRUCTIONS LOCKED FENCES
 *
 * A round of calls is timed alone, since what is made ready before it (posting
 * what completes, completing what was posted) is more than the calls. The same
 * round of nothing, the clock in it, is subtracted. Registers are ordinary
 * memory here: what a write to the device costs is in no figure.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "mlx5_rows.h"
#include "stepper.h"

#define ROUNDS 64
#define DEFAULT_SAMPLES 101
#define MAX_SAMPLES 10001
#define STANDIN_NAME "mlx5_standin.so"

/* ---- set up ---- */

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

static struct pair make_pair(struct bench *b, struct ibv_pd *pd,
			     struct ibv_cq *cq, struct device_cq *device,
			     bool extended)
{
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { .max_send_wr = SQ_ENTRIES, .max_recv_wr = RQ_ENTRIES,
			 .max_send_sge = 1, .max_recv_sge = 1,
			 .max_inline_data = 64 },
		.qp_type = IBV_QPT_RC,
		.pd = pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD |
			     (extended ? IBV_QP_INIT_ATTR_SEND_OPS_FLAGS : 0),
		.send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(b->context, &attr);

	if (!qp)
		die("ibv_create_qp_ex: %s", strerror(errno));
	device_ready(qp, MLX5_PORT_ETHERNET);
	return (struct pair){ .qp = qp, .object = device_qp(qp),
			      .completions = device, .cq = cq };
}

static void make_queues(struct bench *b, struct queues *q, bool single)
{
	struct ibv_pd *pd = b->pd;

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
	q->device = device_cq(q->cq);
	q->devicex = device_cq(ibv_cq_ex_to_cq(q->cqx));
	q->pair = make_pair(b, pd, q->cq, &q->device, false);
	q->extended = make_pair(b, pd, q->cq, &q->device, true);
	q->cursor = make_pair(b, pd, ibv_cq_ex_to_cq(q->cqx), &q->devicex,
			      false);
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

static void set_up(struct bench *b)
{
	b->context = device_open();
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
	make_queues(b, &b->sets[0], false);
	make_queues(b, &b->sets[1], true);
	printf("provider %s\n", device_provider(b->context));
	printf("thread-domain %s\n", b->sets[1].thread_domain ? "yes" : "no");
}

static void check_rows(struct bench *b)
{
	for (unsigned int i = 0; i < nrows; i++) {
		const struct row *row = &rows[i];
		const char *wrong;

		make_ready(b, row, 1);
		wrong = row->check(b, row_queues(b, row), row);
		if (wrong)
			die("row %s: %s", row->name, wrong);
		take_all(b, row_queues(b, row));
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
		double sum = 0;

		for (unsigned int r = 0; r < ROUNDS; r++) {
			double start;

			if (run == row->run)
				make_ready(b, row, row->calls);
			start = now_ns();
			run(b, q, row->calls);
			sum += now_ns() - start;
		}
		times[s] = sum / (ROUNDS * row->calls);
	}
	take_all(b, q);
	qsort(times, samples, sizeof(times[0]), by_value);
	return times[samples / 2];
}

static void time_rows(struct bench *b, unsigned int samples)
{
	for (unsigned int i = 0; i < nrows; i++) {
		const struct row *row = &rows[i];
		double nothing = median_call(b, row, run_nothing, samples);
		double call = median_call(b, row, row->run, samples);

		printf("time %s %.4f\n", row->name,
		       (call - nothing) / row->batch);
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
		make_ready(b, row, row->calls);
		row->run(b, row_queues(b, row), row->calls);
		make_ready(b, row, row->calls);
		marked(b, row, run_nothing);
		marked(b, row, row->run);
		take_all(b, row_queues(b, row));
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
		die("usage: mlx5_datapath time [SAMPLES] | count | trace ROW");
	}
	return 0;
}

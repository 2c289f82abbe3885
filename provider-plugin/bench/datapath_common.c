/* SPDX-License-Identifier: MIT */
/*
 * What the data-path benches of both devices have in common: included by
 * datapath.c and mlx5_datapath.c, after the rows of each. They say which
 * stand-in it is (STANDIN_NAME), how queues are made and the device acts.
 */
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

#include "stepper.h"

#define ROUNDS 64
#define DEFAULT_SAMPLES 101
#define MAX_SAMPLES 10001

/* ---- of each bench ---- */

/* Opens the device and makes all queues; says which provider it is. */
static void set_up(struct bench *b);
/* What a device put in a completion must come out, and what was posted must be
 * in the entry. */
static void check_rows(struct bench *b);
static void time_rows(struct bench *b, unsigned int samples);
/* Makes a round of a row's calls possible; and what is left of it go. */
static void prepare(struct bench *b, const struct row *row);
static void clean_up(struct bench *b, const struct row *row);

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

/* The queues' completion queues, and the domain that their queue pairs are made
 * in: with one caller at a time, that of a thread. */
static struct ibv_pd *make_cqs(struct bench *b, struct queues *q, bool single)
{
	struct ibv_td_init_attr td_attr = {};
	struct ibv_parent_domain_init_attr pd_attr = { .pd = b->pd };
	struct ibv_pd *domain;

	q->cqx = make_cqx(b, single);
	if (!single) {
		q->cq = ibv_create_cq(b->context, CQ_ENTRIES, NULL, NULL, 0);
		if (!q->cq)
			die("ibv_create_cq: %s", strerror(errno));
		return b->pd;
	}
	pd_attr.td = ibv_alloc_td(b->context, &td_attr);
	domain = pd_attr.td ? ibv_alloc_parent_domain(b->context, &pd_attr) :
			      NULL;
	q->cq = ibv_cq_ex_to_cq(make_cqx(b, true));
	q->thread_domain = domain != NULL;
	return domain ? domain : b->pd;
}

static void make_requests(struct bench *b)
{
	for (unsigned int i = 0; i < REQUESTS; i++) {
		struct ibv_send_wr *next_send =
			i + 1 < REQUESTS ? &b->send[i + 1] : NULL;

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
			.next = i + 1 < REQUESTS ? &b->recv[i + 1] : NULL,
		};
	}
}

/* What the work requests are made of. */
static void make_memory(struct bench *b)
{
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
		prepare(b, row);
		row->run(b, row_queues(b, row), row->calls);
		prepare(b, row);
		marked(b, row, run_nothing);
		marked(b, row, row->run);
		clean_up(b, row);
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
		die("usage: " PROGRAM " time [SAMPLES] | count | trace ROW");
	}
	return 0;
}

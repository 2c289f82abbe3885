/* SPDX-License-Identifier: MIT */
/*
 * The control-path bench on ConnectX's queues: one provider, in one process, on
 * mlx5_standin.c, whose commands take next to no time. What is measured is what
 * a provider adds to the kernel's part.
 *
 *   mlx5_control time [samples]   nanoseconds of a verb, median of samples
 *
 * Output, one fact a line:
 *   provider PATH
 *   time ROW NS
 *
 * The number behind the slash is how many objects are made before the first of
 * them is destroyed.
 */
#define _GNU_SOURCE
#include "mlx5_device.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define DEFAULT_SAMPLES 101
#define MAX_SAMPLES 10001
#define MANY 16
#define ROUNDS 16

struct bench {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
};

static void *make_cq(struct bench *b)
{
	return ibv_create_cq(b->context, 127, NULL, NULL, 0);
}

static int end_cq(void *cq)
{
	return ibv_destroy_cq(cq);
}

static void *make_qp(struct bench *b)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = b->cq, .recv_cq = b->cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 128, .max_recv_wr = 128,
			 .max_send_sge = 1, .max_recv_sge = 1 },
	};

	return ibv_create_qp(b->pd, &attr);
}

static int end_qp(void *qp)
{
	return ibv_destroy_qp(qp);
}

static void *make_srq(struct bench *b)
{
	struct ibv_srq_init_attr attr = {
		.attr = { .max_wr = 127, .max_sge = 1 },
	};

	return ibv_create_srq(b->pd, &attr);
}

static int end_srq(void *srq)
{
	return ibv_destroy_srq(srq);
}

static const struct row {
	const char *name;
	void *(*make)(struct bench *b);
	int (*end)(void *object);
} rows[] = {
	{ "cq", make_cq, end_cq },
	{ "qp", make_qp, end_qp },
	{ "srq", make_srq, end_srq },
};

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

/* Median times of making and of destroying one, `count` at a time. */
static void time_row(struct bench *b, const struct row *row,
		     unsigned int count, unsigned int samples)
{
	static double made[MAX_SAMPLES], ended[MAX_SAMPLES];

	for (unsigned int s = 0; s < samples; s++) {
		made[s] = ended[s] = 0;
		for (unsigned int r = 0; r < ROUNDS; r++) {
			void *objects[MANY];
			double start = now_ns(), middle;

			for (unsigned int i = 0; i < count; i++) {
				objects[i] = row->make(b);
				if (!objects[i])
					die("a %s was not made: %s", row->name,
					    strerror(errno));
			}
			middle = now_ns();
			for (unsigned int i = 0; i < count; i++)
				if (row->end(objects[i]))
					die("a %s was not destroyed",
					    row->name);
			ended[s] += now_ns() - middle;
			made[s] += middle - start;
		}
		made[s] /= ROUNDS * count;
		ended[s] /= ROUNDS * count;
	}
	qsort(made, samples, sizeof(made[0]), by_value);
	qsort(ended, samples, sizeof(ended[0]), by_value);
	printf("time create-%s/%u %.1f\n", row->name, count,
	       made[samples / 2]);
	printf("time destroy-%s/%u %.1f\n", row->name, count,
	       ended[samples / 2]);
}

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
	struct bench b = { .context = device_open() };
	long samples = argc > 2 ? atol(argv[2]) : DEFAULT_SAMPLES;

	if (argc < 2 || strcmp(argv[1], "time") || samples < 1 ||
	    samples > MAX_SAMPLES)
		die("usage: mlx5_control time [SAMPLES], 1 to %d", MAX_SAMPLES);
	stay_here();
	b.pd = ibv_alloc_pd(b.context);
	b.cq = make_cq(&b);
	if (!b.pd || !b.cq)
		die("no domain or completion queue: %s", strerror(errno));
	printf("provider %s\n", device_provider(b.context));
	for (unsigned int i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		time_row(&b, &rows[i], 1, samples);
		time_row(&b, &rows[i], MANY, samples);
	}
	return 0;
}

/* SPDX-License-Identifier: MIT */
/*
 * Two threads that post receives to one queue pair at the same time, on
 * mlx5_standin.c: the times of single calls, clock included. Fails when a post
 * is refused or a completion is lost or malformed.
 *
 * Output, one fact a line:
 *   provider PATH
 *   time contend-median NS
 *   time contend-p90 NS
 *   time contend-p99 NS
 */
#define _GNU_SOURCE
#include "mlx5_device.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define THREADS 2
#define POSTS 60 /* of a thread in a round */
#define ROUNDS 2000
#define CALLS (THREADS * POSTS * ROUNDS)

static struct ibv_qp *qp;
static struct ibv_mr *mr;
static char buffer[4096];
static pthread_barrier_t begin, end;
static double times[CALLS];

static double now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

/* Each on a processor of its own, if there are so many. */
static void stay_on(unsigned int which)
{
	cpu_set_t all, one;

	if (sched_getaffinity(0, sizeof(all), &all))
		return;
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		if (!CPU_ISSET(cpu, &all) || which--)
			continue;
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		sched_setaffinity(0, sizeof(one), &one);
		return;
	}
}

static void *post(void *own_times)
{
	struct ibv_sge sge = { .addr = (uintptr_t)buffer, .length = 32,
			       .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	double *next = own_times;

	stay_on((next - times) / (POSTS * ROUNDS));
	for (unsigned int r = 0; r < ROUNDS; r++) {
		pthread_barrier_wait(&begin);
		for (unsigned int i = 0; i < POSTS; i++) {
			double start = now_ns();

			if (ibv_post_recv(qp, &wr, &bad))
				die("a receive was refused");
			*next++ = now_ns() - start;
		}
		pthread_barrier_wait(&end);
	}
	return NULL;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

int main(void)
{
	struct ibv_context *context = device_open();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 255, NULL, NULL, 0);
	struct ibv_qp_init_attr attr = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 1, .max_recv_wr = 128,
			 .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct device_cq device;
	pthread_t threads[THREADS];
	uint32_t received = 0;

	mr = ibv_reg_mr(pd, buffer, sizeof(buffer), IBV_ACCESS_LOCAL_WRITE);
	qp = cq ? ibv_create_qp(pd, &attr) : NULL;
	if (!mr || !qp)
		die("no queue pair: %s", strerror(errno));
	device_ready(qp, MLX5_PORT_ETHERNET);
	device = device_cq(cq);
	printf("provider %s\n", device_provider(context));
	pthread_barrier_init(&begin, NULL, THREADS + 1);
	pthread_barrier_init(&end, NULL, THREADS + 1);
	for (unsigned int i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, post,
				   &times[i * POSTS * ROUNDS]))
			die("no thread");
	for (unsigned int r = 0; r < ROUNDS; r++) {
		struct ibv_wc wc[16];
		int left = THREADS * POSTS;

		pthread_barrier_wait(&begin);
		pthread_barrier_wait(&end);
		for (int i = 0; i < THREADS * POSTS; i++) {
			struct mlx5_cqe64 cqe =
				device_received(device_qp(qp), received++, 64);

			cqe.op_own = MLX5_CQE_RESP_SEND << 4;
			device_complete(&device, cqe);
		}
		while (left > 0) {
			int n = ibv_poll_cq(cq, 16, wc);

			if (n <= 0)
				die("%d completions are missing: %d", left, n);
			left -= n;
		}
	}
	for (unsigned int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	qsort(times, CALLS, sizeof(times[0]), by_value);
	printf("time contend-median %.0f\n", times[CALLS / 2]);
	printf("time contend-p90 %.0f\n", times[CALLS / 10 * 9]);
	printf("time contend-p99 %.0f\n", times[CALLS / 100 * 99]);
	return 0;
}

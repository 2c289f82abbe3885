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

#include "mlx5_rows.h"

#include <pthread.h>

#define PROGRAM "mlx5_datapath"
#define STANDIN_NAME "mlx5_standin.so"

#include "datapath_common.c"

/* ---- set up ---- */

static struct ibv_srq *make_srq(struct ibv_pd *pd)
{
	struct ibv_srq_init_attr attr = {
		.attr = { .max_wr = SRQ_ENTRIES, .max_sge = 1 },
	};
	struct ibv_srq *srq = ibv_create_srq(pd, &attr);

	if (!srq)
		die("ibv_create_srq: %s", strerror(errno));
	return srq;
}

/* Receives are the queue pair's own, or `srq`'s. */
static struct pair make_pair(struct bench *b, struct ibv_pd *pd,
			     struct ibv_cq *cq, struct device_cq *device,
			     enum ibv_qp_type type, bool extended,
			     struct ibv_srq *srq)
{
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = cq,
		.recv_cq = cq,
		.srq = srq,
		.cap = { .max_send_wr = SQ_ENTRIES,
			 .max_recv_wr = srq ? 0 : RQ_ENTRIES,
			 .max_send_sge = 1, .max_recv_sge = srq ? 0 : 1,
			 .max_inline_data = 64 },
		.qp_type = type,
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
			      .completions = device, .cq = cq, .srq = srq,
			      .receives = srq ? device_srq(srq) :
						device_qp(qp),
			      .blocks = 1 };
}

static struct turns make_turns(struct bench *b, struct queues *q,
			       unsigned int count)
{
	struct turns turns = { .pairs = calloc(count, sizeof(struct pair)),
			       .count = count };

	if (!turns.pairs)
		die("out of memory");
	for (unsigned int i = 0; i < count; i++)
		turns.pairs[i] = make_pair(b, q->domain, q->cq, &q->device,
					   IBV_QPT_RC, false, NULL);
	return turns;
}

static void make_queues(struct bench *b, struct queues *q, bool single)
{
	struct ibv_pd *pd = make_cqs(b, q, single);

	q->device = device_cq(q->cq);
	q->devicex = device_cq(ibv_cq_ex_to_cq(q->cqx));
	q->pair = make_pair(b, pd, q->cq, &q->device, IBV_QPT_RC, false, NULL);
	q->extended = make_pair(b, pd, q->cq, &q->device, IBV_QPT_RC, true,
				NULL);
	/* Those that send are first: there are few registers of one queue pair. */
	q->packets = make_pair(b, pd, q->cq, &q->device, IBV_QPT_RAW_PACKET,
			       false, NULL);
	q->cursor = make_pair(b, pd, ibv_cq_ex_to_cq(q->cqx), &q->devicex,
			      IBV_QPT_RC, false, NULL);
	q->shared = make_pair(b, pd, q->cq, &q->device, IBV_QPT_RC, false,
			      make_srq(pd));
	q->domain = pd;
}

/* Uses the queues of several threads, long enough to be taken for their owner. */
static void *use_queues(void *arg)
{
	struct bench *b = arg;

	for (unsigned int i = 0; i < nrows; i++) {
		const struct row *row = &rows[i];

		if (row->users != SEVERAL)
			continue;
		for (unsigned int r = 0; r < 16; r++) {
			make_ready(b, row, row->calls);
			row->run(b, row_queues(b, row), row->calls);
		}
		take_all(b, row_queues(b, row));
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
	b->context = device_open();
	make_memory(b);
	make_queues(b, &b->sets[ANY], false);
	make_queues(b, &b->sets[SINGLE], true);
	make_queues(b, &b->sets[SEVERAL], false);
	make_dv_pairs(b, &b->sets[ANY]);
	/* Last, since there are fewer registers than these. */
	for (unsigned int i = 0; i < USERS; i++)
		b->sets[i].many = make_turns(b, &b->sets[i], MANY);
	b->sets[ANY].thousand = make_turns(b, &b->sets[ANY], THOUSAND);
	another_thread(b);
	printf("provider %s\n", device_provider(b->context));
	printf("thread-domain %s\n", b->sets[SINGLE].thread_domain ? "yes" : "no");
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

/* Median time of one call. */
static double median_call(struct bench *b, const struct row *row, run_fn run,
			  struct queues *q, unsigned int samples)
{
	static double times[MAX_SAMPLES];
	bool real = q == row_queues(b, row);

	for (unsigned int s = 0; s < samples; s++) {
		double sum = 0;

		for (unsigned int r = 0; r < ROUNDS; r++) {
			double start;

			if (real && run == row->run)
				make_ready(b, row, row->calls);
			start = now_ns();
			run(b, q, row->calls);
			sum += now_ns() - start;
		}
		times[s] = sum / (ROUNDS * row->calls);
	}
	if (real)
		take_all(b, q);
	qsort(times, samples, sizeof(times[0]), by_value);
	return times[samples / 2];
}

static void time_rows(struct bench *b, unsigned int samples)
{
	for (unsigned int i = 0; i < nrows; i++) {
		const struct row *row = &rows[i];
		struct queues *q = row_queues(b, row);
		double nothing = median_call(b, row, run_nothing, q, samples);
		double call = median_call(b, row, row->run, q, samples);
		double empty = median_call(b, row, row->run, empty_queues(),
					   samples);

		printf("time %s %.4f\n", row->name,
		       (call - nothing) / row->batch);
		printf("calls %s %.4f\n", row->name,
		       (empty - nothing) / row->batch);
	}
}

static void prepare(struct bench *b, const struct row *row)
{
	make_ready(b, row, row->calls);
}

static void clean_up(struct bench *b, const struct row *row)
{
	take_all(b, row_queues(b, row));
}

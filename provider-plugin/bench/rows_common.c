/* SPDX-License-Identifier: MIT */
/*
 * The calls of both data-path benches' rows: included by rows.c and mlx5_rows.c,
 * which say what queue pair the lists are posted to (POSTED_TO).
 */

/* Keeps a loop a loop. */
#define BARRIER() __asm__ volatile("" ::: "memory")
/* The list of the last `count` requests, and the last one. */
#define LAST_OF(list, count) (&(list)[REQUESTS - (count)])
#define LAST(list) LAST_OF(list, 1)

void run_nothing(struct bench *b, struct queues *q, unsigned int calls)
{
	(void)b;
	(void)q;
	for (unsigned int i = 0; i < calls; i++)
		BARRIER();
}

static void run_poll(struct bench *b, struct queues *q, unsigned int calls)
{
	for (unsigned int i = 0; i < calls; i++) {
		ibv_poll_cq(q->cq, 1, b->wc);
		BARRIER();
	}
}

static void run_poll_batch(struct bench *b, struct queues *q,
			   unsigned int calls)
{
	for (unsigned int i = 0; i < calls; i++) {
		ibv_poll_cq(q->cq, BATCH, b->wc);
		BARRIER();
	}
}

static inline uint64_t read_fields(struct ibv_cq_ex *cq)
{
	return ibv_wc_read_opcode(cq) + ibv_wc_read_byte_len(cq) +
	       ibv_wc_read_imm_data(cq) + ibv_wc_read_qp_num(cq) +
	       ibv_wc_read_wc_flags(cq);
}

static void run_cursor(struct bench *b, struct queues *q, unsigned int calls)
{
	struct ibv_poll_cq_attr attr = {};
	uint64_t sum = 0;

	for (unsigned int i = 0; i < calls; i++) {
		if (!ibv_start_poll(q->cqx, &attr)) {
			sum += read_fields(q->cqx);
			ibv_end_poll(q->cqx);
		}
	}
	b->sink += sum;
}

static void run_cursor_batch(struct bench *b, struct queues *q,
			     unsigned int calls)
{
	struct ibv_poll_cq_attr attr = {};
	uint64_t sum = 0;

	for (unsigned int i = 0; i < calls; i++) {
		unsigned int n = 0;

		if (ibv_start_poll(q->cqx, &attr))
			continue;
		do
			sum += read_fields(q->cqx);
		while (++n < BATCH && !ibv_next_poll(q->cqx));
		ibv_end_poll(q->cqx);
	}
	b->sink += sum;
}

static void post_list(struct ibv_qp *qp, struct ibv_send_wr *list,
		      unsigned int calls)
{
	struct ibv_send_wr *bad;

	for (unsigned int i = 0; i < calls; i++) {
		ibv_post_send(qp, list, &bad);
		BARRIER();
	}
}

static void run_send(struct bench *b, struct queues *q, unsigned int calls)
{
	post_list(POSTED_TO(q), LAST(b->send), calls);
}

static void run_send_batch(struct bench *b, struct queues *q,
			   unsigned int calls)
{
	post_list(POSTED_TO(q), LAST_OF(b->send, BATCH), calls);
}

static void run_inline(struct bench *b, struct queues *q, unsigned int calls)
{
	post_list(POSTED_TO(q), LAST(b->send_inline), calls);
}

static void run_inline_batch(struct bench *b, struct queues *q,
			     unsigned int calls)
{
	post_list(POSTED_TO(q), LAST_OF(b->send_inline, BATCH), calls);
}

static void post_recv(struct ibv_qp *qp, struct ibv_recv_wr *list,
		      unsigned int calls)
{
	struct ibv_recv_wr *bad;

	for (unsigned int i = 0; i < calls; i++) {
		ibv_post_recv(qp, list, &bad);
		BARRIER();
	}
}

static void run_recv(struct bench *b, struct queues *q, unsigned int calls)
{
	post_recv(POSTED_TO(q), LAST(b->recv), calls);
}

static void run_recv_batch(struct bench *b, struct queues *q,
			   unsigned int calls)
{
	post_recv(POSTED_TO(q), LAST_OF(b->recv, BATCH), calls);
}

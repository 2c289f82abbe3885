/* SPDX-License-Identifier: MIT */
/*
 * The measured calls, and the bench's part as the device.
 *
 * Every run function is a plain loop of `calls` calls of public verbs, so that
 * run_nothing, the same loop around nothing, is what has to be subtracted.
 */
#include "rows.h"
#include "floor_calls.h"

#include <errno.h>
#include <pthread.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/rdma_user_rxe.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#define POSTED_TO(q) ((q)->qp)

#include "rows_common.c"

static uint32_t load(const uint32_t *index)
{
	return __atomic_load_n(index, __ATOMIC_ACQUIRE);
}

static void store(uint32_t *index, uint32_t value)
{
	__atomic_store_n(index, value, __ATOMIC_RELEASE);
}

/* ---- the device ---- */

void fill_completions(struct rxe_queue_buf *ring)
{
	for (uint32_t i = 0; i <= ring->index_mask; i++) {
		struct ib_uverbs_wc *wc = (struct ib_uverbs_wc *)
			(ring->data + ((size_t)i << ring->log2_elem_size));

		memset(wc, 0, sizeof(*wc));
		wc->wr_id = 1000 + i;
		wc->status = IBV_WC_SUCCESS;
		wc->opcode = IBV_WC_RECV;
		wc->byte_len = 64 + i;
		wc->ex.imm_data = 0x01020304;
		wc->qp_num = 17;
		wc->src_qp = 18;
		wc->wc_flags = IBV_WC_WITH_IMM;
		wc->port_num = 1;
	}
}

static void fill(struct rxe_queue_buf *ring, uint32_t entries)
{
	store(&ring->producer_index,
	      (load(&ring->consumer_index) + entries) & ring->index_mask);
}

static void drain(struct rxe_queue_buf *ring)
{
	store(&ring->consumer_index, load(&ring->producer_index));
}

void device_act(struct queues *q, const struct row *row)
{
	switch (row->device) {
	case DEVICE_NOTHING:
		break;
	case DEVICE_FILLS_CQ:
		fill(q->cq_ring, row->calls * row->batch);
		break;
	case DEVICE_FILLS_CQX:
		fill(q->cqx_ring, row->calls * row->batch);
		break;
	case DEVICE_DRAINS_SQ:
		drain(q->sq_ring);
		break;
	case DEVICE_DRAINS_SQX:
		drain(q->sqx_ring);
		break;
	case DEVICE_DRAINS_RQ:
		drain(q->rq_ring);
		break;
	}
}

struct queues *row_queues(struct bench *b, const struct row *row)
{
	return &b->sets[row->users];
}

/* ---- what is subtracted ---- */

/* The write that the stock provider makes, without what fills the command. */
void run_doorbell(struct bench *b, struct queues *q, unsigned int calls)
{
	struct { struct ib_uverbs_cmd_hdr hdr; struct ib_uverbs_post_send cmd; } c;

	(void)q;
	memset(&c, 0, sizeof(c));
	for (unsigned int i = 0; i < calls; i++) {
		if (write(b->context->cmd_fd, &c, sizeof(c)) != sizeof(c))
			b->sink++;
		BARRIER();
	}
}

/* ---- completion queue ---- */

static const char *check_poll(struct bench *b, struct queues *q,
			      const struct row *row)
{
	uint32_t at = load(&q->cq_ring->consumer_index);
	unsigned int want = row->device == DEVICE_NOTHING ? 0 : row->batch;

	memset(b->wc, 0xff, sizeof(b->wc));
	if (ibv_poll_cq(q->cq, row->batch, b->wc) != (int)want)
		return "ibv_poll_cq returned another number of completions";
	for (unsigned int i = 0; i < want; i++) {
		const struct ibv_wc *wc = &b->wc[i];
		uint32_t slot = (at + i) & q->cq_ring->index_mask;

		if (wc->wr_id != 1000 + slot || wc->byte_len != 64 + slot ||
		    wc->status != IBV_WC_SUCCESS || wc->opcode != IBV_WC_RECV ||
		    wc->imm_data != 0x01020304 || wc->qp_num != 17 ||
		    wc->src_qp != 18 || wc->wc_flags != IBV_WC_WITH_IMM)
			return "ibv_poll_cq gave other fields than the device's";
	}
	if (load(&q->cq_ring->consumer_index) !=
	    ((at + want) & q->cq_ring->index_mask))
		return "ibv_poll_cq left another consumer index";
	return NULL;
}

static const char *check_cursor(struct bench *b, struct queues *q,
				const struct row *row)
{
	struct ibv_poll_cq_attr attr = {};
	uint32_t at = load(&q->cqx_ring->consumer_index);
	unsigned int n = 0;

	(void)b;
	if (ibv_start_poll(q->cqx, &attr))
		return "ibv_start_poll found nothing";
	do {
		uint32_t slot = (at + n) & q->cqx_ring->index_mask;

		if (q->cqx->wr_id != 1000 + slot ||
		    q->cqx->status != IBV_WC_SUCCESS ||
		    ibv_wc_read_opcode(q->cqx) != IBV_WC_RECV ||
		    ibv_wc_read_byte_len(q->cqx) != 64 + slot ||
		    ibv_wc_read_imm_data(q->cqx) != 0x01020304 ||
		    ibv_wc_read_qp_num(q->cqx) != 17 ||
		    ibv_wc_read_wc_flags(q->cqx) != IBV_WC_WITH_IMM) {
			ibv_end_poll(q->cqx);
			return "the cursor gave other fields than the device's";
		}
	} while (++n < row->batch && !ibv_next_poll(q->cqx));
	ibv_end_poll(q->cqx);
	if (n != row->batch || load(&q->cqx_ring->consumer_index) !=
				       ((at + n) & q->cqx_ring->index_mask))
		return "the cursor left another consumer index";
	return NULL;
}

/* ---- send and receive queue ---- */

static inline void wr_one(struct bench *b, struct ibv_qp_ex *qp,
			  unsigned int i, bool inline_data)
{
	qp->wr_id = i;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp);
	if (inline_data)
		ibv_wr_set_inline_data(qp, b->buffer, INLINE_LENGTH);
	else
		ibv_wr_set_sge(qp, b->sge[i].lkey, b->sge[i].addr,
			       b->sge[i].length);
}

static inline void wr_list(struct bench *b, struct ibv_qp_ex *qp,
			   unsigned int calls, unsigned int batch,
			   bool inline_data)
{
	for (unsigned int i = 0; i < calls; i++) {
		ibv_wr_start(qp);
		for (unsigned int j = BATCH - batch; j < BATCH; j++)
			wr_one(b, qp, j, inline_data);
		if (ibv_wr_complete(qp))
			b->sink++;
	}
}

static void run_wr(struct bench *b, struct queues *q, unsigned int calls)
{
	wr_list(b, q->qpx, calls, 1, false);
}

static void run_wr_batch(struct bench *b, struct queues *q, unsigned int calls)
{
	wr_list(b, q->qpx, calls, BATCH, false);
}

static void run_wr_inline(struct bench *b, struct queues *q,
			  unsigned int calls)
{
	wr_list(b, q->qpx, calls, 1, true);
}

static void run_wr_inline_batch(struct bench *b, struct queues *q,
				unsigned int calls)
{
	wr_list(b, q->qpx, calls, BATCH, true);
}

/* What rdma_rxe reads of a send entry of a SEND. */
static const char *check_sent(struct bench *b, struct rxe_queue_buf *ring,
			      uint32_t at, unsigned int batch, bool inline_data)
{
	for (unsigned int i = 0; i < batch; i++) {
		unsigned int n = BATCH - batch + i;
		uint32_t slot = (at + i) & ring->index_mask;
		const struct rxe_send_wqe *wqe = (const struct rxe_send_wqe *)
			(ring->data + ((size_t)slot << ring->log2_elem_size));
		uint32_t length = inline_data ? INLINE_LENGTH :
						b->sge[n].length;
		uint32_t flags = IBV_SEND_SIGNALED |
				 (wqe->wr.send_flags & IBV_SEND_INLINE);

		if (wqe->wr.wr_id != n || wqe->wr.opcode != IBV_WR_SEND ||
		    wqe->wr.send_flags != flags || wqe->state ||
		    wqe->dma.length != length || wqe->dma.resid != length ||
		    wqe->dma.cur_sge || wqe->dma.sge_offset)
			return "a send entry has other fields than asked for";
		if (inline_data) {
			if (memcmp(wqe->dma.inline_data, b->buffer, length))
				return "a send entry has other inline data";
		} else if (wqe->dma.num_sge != 1 ||
			   memcmp(wqe->dma.sge, &b->sge[n], sizeof(b->sge[n]))) {
			return "a send entry has another scatter list";
		}
	}
	if (load(&ring->producer_index) != ((at + batch) & ring->index_mask))
		return "the post left another producer index";
	return NULL;
}

static bool is_inline(const struct row *row)
{
	return strstr(row->name, "inline") != NULL;
}

static const char *check_send(struct bench *b, struct queues *q,
			      const struct row *row)
{
	uint32_t at = load(&q->sq_ring->producer_index);

	row->run(b, q, 1);
	return check_sent(b, q->sq_ring, at, row->batch, is_inline(row));
}

static const char *check_wr(struct bench *b, struct queues *q,
			    const struct row *row)
{
	uint32_t at = load(&q->sqx_ring->producer_index);

	row->run(b, q, 1);
	return check_sent(b, q->sqx_ring, at, row->batch, is_inline(row));
}

static const char *check_recv(struct bench *b, struct queues *q,
			      const struct row *row)
{
	struct rxe_queue_buf *ring = q->rq_ring;
	uint32_t at = load(&ring->producer_index);

	row->run(b, q, 1);
	for (unsigned int i = 0; i < row->batch; i++) {
		unsigned int n = BATCH - row->batch + i;
		uint32_t slot = (at + i) & ring->index_mask;
		const struct rxe_recv_wqe *wqe = (const struct rxe_recv_wqe *)
			(ring->data + ((size_t)slot << ring->log2_elem_size));

		if (wqe->wr_id != n || wqe->dma.num_sge != 1 ||
		    wqe->dma.length != b->sge[n].length ||
		    wqe->dma.resid != b->sge[n].length || wqe->dma.cur_sge ||
		    wqe->dma.sge_offset ||
		    memcmp(wqe->dma.sge, &b->sge[n], sizeof(b->sge[n])))
			return "a receive entry has other fields than asked for";
	}
	if (load(&ring->producer_index) !=
	    ((at + row->batch) & ring->index_mask))
		return "ibv_post_recv left another producer index";
	return NULL;
}

/* ---- floors: what a bare loop needs for the same bytes ---- */

static pthread_spinlock_t floor_lock;

void rows_init(void)
{
	pthread_spin_init(&floor_lock, PTHREAD_PROCESS_PRIVATE);
}

static inline void floor_poll_batch(struct bench *b, struct rxe_queue_buf *ring,
				    unsigned int batch)
{
	uint32_t at = ring->consumer_index;
	uint32_t ready = (load(&ring->producer_index) - at) & ring->index_mask;

	for (unsigned int i = 0; i < batch && i < ready; i++) {
		memcpy(&b->wc[i], ring->data + ((size_t)at << 7),
		       sizeof(b->wc[i]));
		at = (at + 1) & ring->index_mask;
	}
	store(&ring->consumer_index, at);
}

static inline void floor_send_batch(struct ibv_send_wr *wr,
				    struct rxe_queue_buf *ring)
{
	uint32_t at = ring->producer_index;

	for (; wr; wr = wr->next) {
		struct rxe_send_wqe *wqe = (struct rxe_send_wqe *)
			(ring->data + ((size_t)at << 9));

		wqe->wr.wr_id = wr->wr_id;
		wqe->wr.opcode = wr->opcode;
		wqe->wr.send_flags = wr->send_flags;
		wqe->wr.ex.imm_data = 0;
		wqe->state = 0;
		wqe->dma.length = wr->sg_list->length;
		wqe->dma.resid = wr->sg_list->length;
		wqe->dma.cur_sge = 0;
		wqe->dma.num_sge = 1;
		wqe->dma.sge_offset = 0;
		memcpy(wqe->dma.sge, wr->sg_list, sizeof(*wr->sg_list));
		at = (at + 1) & ring->index_mask;
	}
	store(&ring->producer_index, at);
}

static inline void floor_recv_batch(struct ibv_recv_wr *wr,
				    struct rxe_queue_buf *ring)
{
	uint32_t at = ring->producer_index;

	for (; wr; wr = wr->next) {
		struct rxe_recv_wqe *wqe = (struct rxe_recv_wqe *)
			(ring->data + ((size_t)at << 6));

		wqe->wr_id = wr->wr_id;
		wqe->dma.length = wr->sg_list->length;
		wqe->dma.resid = wr->sg_list->length;
		wqe->dma.cur_sge = 0;
		wqe->dma.num_sge = 1;
		wqe->dma.sge_offset = 0;
		memcpy(wqe->dma.sge, wr->sg_list, sizeof(*wr->sg_list));
		at = (at + 1) & ring->index_mask;
	}
	store(&ring->producer_index, at);
}

#define FLOOR(name, work)                                                    \
	static void name(struct bench *b, struct queues *q,                  \
			 unsigned int calls)                                 \
	{                                                                    \
		(void)b;                                                     \
		for (unsigned int i = 0; i < calls; i++) {                   \
			work;                                                \
			BARRIER();                                           \
		}                                                            \
	}
#define LOCKED(work)                        \
	pthread_spin_lock(&floor_lock);     \
	work;                               \
	pthread_spin_unlock(&floor_lock)

FLOOR(floor_poll, floor_poll_batch(b, q->cq_ring, 1))
FLOOR(floor_poll_locked, LOCKED(floor_poll_batch(b, q->cq_ring, 1)))
FLOOR(floor_poll_16, floor_poll_batch(b, q->cq_ring, BATCH))
FLOOR(floor_send, floor_send_batch(LAST(b->send), q->sq_ring))
FLOOR(floor_send_locked, LOCKED(floor_send_batch(LAST(b->send), q->sq_ring)))
FLOOR(floor_send_16, floor_send_batch(b->send, q->sq_ring))
FLOOR(floor_recv, floor_recv_batch(LAST(b->recv), q->rq_ring))
FLOOR(floor_recv_locked, LOCKED(floor_recv_batch(LAST(b->recv), q->rq_ring)))
FLOOR(floor_recv_16, floor_recv_batch(b->recv, q->rq_ring))

/* A poll through a pointer into a library, as the interface has it. */
FLOOR(floor_poll_called, floor_poll_call(q->cq_ring, 1, b->wc))

/* The cursor's floor is mostly its calls, each through a pointer into a library. */
static uint64_t floor_read_fields(struct floor_cursor *c)
{
	return c->read[0](c) + c->read[1](c) + c->read[2](c) + c->read[3](c) +
	       c->read[4](c);
}

static void floor_cursor_calls(struct bench *b, struct rxe_queue_buf *ring,
			       unsigned int calls, unsigned int batch,
			       pthread_spinlock_t *lock)
{
	struct floor_cursor cursor;
	uint64_t sum = 0;

	floor_cursor_init(&cursor, ring, lock);
	for (unsigned int i = 0; i < calls; i++) {
		unsigned int n = 0;

		if (cursor.start(&cursor))
			continue;
		do
			sum += floor_read_fields(&cursor);
		while (++n < batch && !cursor.next(&cursor));
		cursor.end(&cursor);
	}
	b->sink += sum;
}

static void floor_cursor(struct bench *b, struct queues *q, unsigned int calls)
{
	floor_cursor_calls(b, q->cqx_ring, calls, 1, NULL);
}

static void floor_cursor_locked(struct bench *b, struct queues *q,
				unsigned int calls)
{
	floor_cursor_calls(b, q->cqx_ring, calls, 1, &floor_lock);
}

static void floor_cursor_16(struct bench *b, struct queues *q,
			    unsigned int calls)
{
	floor_cursor_calls(b, q->cqx_ring, calls, BATCH, NULL);
}

/* ---- the table ---- */

#define CQ_ROWS(prefix, users)                                                \
	{ prefix "poll/1", 1, 112, users, DEVICE_FILLS_CQ, false, run_poll,   \
	  check_poll },                                                       \
	{ prefix "poll/16", BATCH, 7, users, DEVICE_FILLS_CQ, false,          \
	  run_poll_batch, check_poll },                                       \
	{ prefix "poll-empty/1", 1, 112, users, DEVICE_NOTHING, false,        \
	  run_poll, check_poll },                                             \
	{ prefix "cursor/1", 1, 112, users, DEVICE_FILLS_CQX, false,          \
	  run_cursor, check_cursor },                                         \
	{ prefix "cursor/16", BATCH, 7, users, DEVICE_FILLS_CQX, false,       \
	  run_cursor_batch, check_cursor }
#define QP_ROWS(prefix, users)                                                \
	{ prefix "send/1", 1, 48, users, DEVICE_DRAINS_SQ, true, run_send,    \
	  check_send },                                                       \
	{ prefix "send/16", BATCH, 3, users, DEVICE_DRAINS_SQ, true,          \
	  run_send_batch, check_send },                                       \
	{ prefix "send-inline/1", 1, 48, users, DEVICE_DRAINS_SQ, true,       \
	  run_inline, check_send },                                           \
	{ prefix "send-inline/16", BATCH, 3, users, DEVICE_DRAINS_SQ, true,   \
	  run_inline_batch, check_send },                                     \
	{ prefix "recv/1", 1, 112, users, DEVICE_DRAINS_RQ, false, run_recv,  \
	  check_recv },                                                       \
	{ prefix "recv/16", BATCH, 7, users, DEVICE_DRAINS_RQ, false,         \
	  run_recv_batch, check_recv },                                       \
	{ prefix "wr-send/1", 1, 48, users, DEVICE_DRAINS_SQX, true, run_wr,  \
	  check_wr },                                                         \
	{ prefix "wr-send/16", BATCH, 3, users, DEVICE_DRAINS_SQX, true,      \
	  run_wr_batch, check_wr },                                           \
	{ prefix "wr-inline/1", 1, 48, users, DEVICE_DRAINS_SQX, true,        \
	  run_wr_inline, check_wr },                                          \
	{ prefix "wr-inline/16", BATCH, 3, users, DEVICE_DRAINS_SQX, true,    \
	  run_wr_inline_batch, check_wr }
#define FLOOR_ROW(name, batch, calls, device, run)                            \
	{ "floor-" name, batch, calls, ANY, device, false, run, NULL }

const struct row rows[] = {
	CQ_ROWS("", ANY),
	QP_ROWS("", ANY),
	CQ_ROWS("single-", SINGLE),
	QP_ROWS("single-", SINGLE),
	CQ_ROWS("several-", SEVERAL),
	QP_ROWS("several-", SEVERAL),
	FLOOR_ROW("poll/1", 1, 112, DEVICE_FILLS_CQ, floor_poll),
	FLOOR_ROW("poll-locked/1", 1, 112, DEVICE_FILLS_CQ, floor_poll_locked),
	FLOOR_ROW("poll/16", BATCH, 7, DEVICE_FILLS_CQ, floor_poll_16),
	FLOOR_ROW("poll-called/1", 1, 112, DEVICE_FILLS_CQ, floor_poll_called),
	FLOOR_ROW("poll-empty/1", 1, 112, DEVICE_NOTHING, floor_poll_called),
	FLOOR_ROW("cursor/1", 1, 112, DEVICE_FILLS_CQX, floor_cursor),
	FLOOR_ROW("cursor-locked/1", 1, 112, DEVICE_FILLS_CQX,
		  floor_cursor_locked),
	FLOOR_ROW("cursor/16", BATCH, 7, DEVICE_FILLS_CQX, floor_cursor_16),
	FLOOR_ROW("send/1", 1, 48, DEVICE_DRAINS_SQ, floor_send),
	FLOOR_ROW("send-locked/1", 1, 48, DEVICE_DRAINS_SQ, floor_send_locked),
	FLOOR_ROW("send/16", BATCH, 3, DEVICE_DRAINS_SQ, floor_send_16),
	FLOOR_ROW("recv/1", 1, 112, DEVICE_DRAINS_RQ, floor_recv),
	FLOOR_ROW("recv-locked/1", 1, 112, DEVICE_DRAINS_RQ, floor_recv_locked),
	FLOOR_ROW("recv/16", BATCH, 7, DEVICE_DRAINS_RQ, floor_recv_16),
};
const unsigned int nrows = sizeof(rows) / sizeof(rows[0]);

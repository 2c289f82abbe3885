/* SPDX-License-Identifier: MIT */
/*
 * The measured calls on ConnectX's queues, and what is made ready for them.
 *
 * A completion is of a work request that is outstanding: before a round of
 * polling as many are posted, and between rounds of posting all complete. That
 * is not measured.
 */
#define _GNU_SOURCE

#include "mlx5_rows.h"

#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <string.h>

#define POSTED_TO(q) ((q)->pair.qp)

#include "rows_common.c"

struct queues *row_queues(struct bench *b, const struct row *row)
{
	return &b->sets[row->users];
}

/* ---- making ready ---- */

uint32_t posted(const struct mlx5_object *queue, unsigned int record,
		uint32_t before)
{
	return (be32toh(queue->records[record]) - before) & 0xffff;
}

/* Receives that have not completed. A shared queue has its record where a queue
 * pair has that of receives. */
static uint32_t outstanding(const struct pair *p)
{
	return posted(p->receives, MLX5_RCV_DBR, p->received);
}

static void drain(struct bench *b, struct pair *p)
{
	while (ibv_poll_cq(p->cq, BATCH, b->wc) > 0)
		;
}

/* Everything that was sent completes, by the last work request. */
static void empty_send_queue(struct bench *b, struct pair *p)
{
	uint32_t blocks = posted(p->object, MLX5_SND_DBR, p->sent);

	if (!blocks)
		return;
	p->sent += blocks;
	device_complete(p->completions,
			device_sent(p->object, p->sent - p->blocks));
	drain(b, p);
}

/* Where the next receive is that the device takes. */
static uint16_t take_slot(struct pair *p)
{
	uint16_t slot = p->slot;

	if (!p->srq)
		return p->received;
	p->slot = device_shared_next(p->receives, slot);
	return slot;
}

static bool is_of_packets(const struct pair *p)
{
	return p->qp->qp_type == IBV_QPT_RAW_PACKET;
}

static void complete_receive(struct pair *p, uint16_t slot)
{
	struct mlx5_cqe64 cqe = device_received(p->object, slot,
						64 + p->received % 8);

	if (is_of_packets(p)) {
		/* Both checksums of an IPv4 packet are right. */
		cqe.hds_ip_ext = MLX5_CQE_L3_OK | MLX5_CQE_L4_OK;
		cqe.l4_hdr_type_etc = MLX5_CQE_L3_HDR_TYPE_IPV4 << 2;
	} else {
		cqe.op_own = MLX5_CQE_RESP_SEND_IMM << 4;
		cqe.imm_inval_pkey = htobe32(0x01020304);
	}
	device_complete(p->completions, cqe);
	p->received++;
}

static void complete_receives(struct pair *p)
{
	uint32_t count = outstanding(p);

	while (count--)
		complete_receive(p, take_slot(p));
}

/* All of a shared queue's complete, the last first, as those that several queue
 * pairs have taken may: the list has another order from then on. */
static void empty_shared_queue(struct bench *b, struct pair *p)
{
	uint32_t count = outstanding(p);
	uint16_t slots[SRQ_ENTRIES];

	if (count > SRQ_ENTRIES)
		die("a shared queue of %d has %u receives", SRQ_ENTRIES, count);
	for (unsigned int i = 0; i < count; i++)
		slots[i] = take_slot(p);
	while (count--)
		complete_receive(p, slots[count]);
	drain(b, p);
}

static void empty_recv_queue(struct bench *b, struct pair *p)
{
	complete_receives(p);
	drain(b, p);
}

static void receive(struct bench *b, struct pair *p, unsigned int count)
{
	struct ibv_recv_wr *bad;

	for (unsigned int i = 0; i < count; i++) {
		/* Told by the identifier which it is. */
		struct ibv_recv_wr wr = *LAST(b->recv);

		wr.wr_id = 1000 + (p->received + i) % RQ_ENTRIES;
		if (p->srq ? ibv_post_srq_recv(p->srq, &wr, &bad) :
			     ibv_post_recv(p->qp, &wr, &bad))
			die("a receive was refused");
	}
	complete_receives(p);
}

/* Whose receive completes `before` turns before the next. */
static struct pair *whose_turn(struct turns *turns, unsigned int before)
{
	return &turns->pairs[(turns->next - before) % turns->count];
}

static void receive_in_turns(struct bench *b, struct turns *turns,
			     unsigned int count)
{
	while (count--) {
		receive(b, whose_turn(turns, 0), 1);
		turns->next++;
	}
}

static void send(struct bench *b, struct pair *p, unsigned int count)
{
	struct ibv_send_wr *bad;
	uint32_t blocks;

	for (unsigned int i = 0; i < count; i++)
		if (ibv_post_send(p->qp, LAST(b->send), &bad))
			die("a send was refused");
	blocks = posted(p->object, MLX5_SND_DBR, p->sent);
	if (blocks != count)
		die("%u sends of a block have %u blocks", count, blocks);
	while (count--)
		device_complete(p->completions,
				device_sent(p->object, p->sent++));
}

void make_ready(struct bench *b, const struct row *row, unsigned int calls)
{
	struct queues *q = row_queues(b, row);

	switch (row->ready) {
	case NOTHING:
		break;
	case RECEIVED:
		receive(b, &q->pair, calls * row->batch);
		break;
	case SENT:
		send(b, &q->pair, calls * row->batch);
		break;
	case RECEIVED_CURSOR:
		receive(b, &q->cursor, calls * row->batch);
		break;
	case SQ_EMPTY:
		empty_send_queue(b, &q->pair);
		break;
	case SQX_EMPTY:
		empty_send_queue(b, &q->extended);
		break;
	case RQ_EMPTY:
		empty_recv_queue(b, &q->pair);
		break;
	case RECEIVED_SHARED:
		receive(b, &q->shared, calls * row->batch);
		break;
	case RECEIVED_MANY:
		receive_in_turns(b, &q->many, calls * row->batch);
		break;
	case RECEIVED_THOUSAND:
		receive_in_turns(b, &q->thousand, calls * row->batch);
		break;
	case SRQ_EMPTY:
		empty_recv_queue(b, &q->shared);
		break;
	case PACKETS_EMPTY:
		empty_send_queue(b, &q->packets);
		break;
	case RECEIVED_PACKETS:
		receive(b, &q->packets, calls * row->batch);
		break;
	case DYNAMIC_EMPTY:
		empty_send_queue(b, &q->dynamic);
		break;
	case KEYS_EMPTY:
		empty_send_queue(b, &q->keys);
		break;
	}
}

void take_all(struct bench *b, struct queues *q)
{
	empty_send_queue(b, &q->pair);
	empty_send_queue(b, &q->extended);
	empty_recv_queue(b, &q->pair);
	empty_recv_queue(b, &q->cursor);
	empty_shared_queue(b, &q->shared);
	empty_send_queue(b, &q->packets);
	empty_recv_queue(b, &q->packets);
	if (q->dynamic.qp) {
		empty_send_queue(b, &q->dynamic);
		empty_send_queue(b, &q->keys);
	}
	for (unsigned int i = 0; i < q->many.count; i++)
		empty_recv_queue(b, &q->many.pairs[i]);
	for (unsigned int i = 0; i < q->thousand.count; i++)
		empty_recv_queue(b, &q->thousand.pairs[i]);
}

/* ---- completion queue ---- */

/* What is wrong with a completion of a receive; `at` is the receive's number. */
static const char *check_received(const struct ibv_wc *wc,
				  const struct pair *p, uint32_t at)
{
	if (wc->status || wc->qp_num != p->qp->qp_num)
		return "ibv_poll_cq gave another status or number";
	if (wc->wr_id != 1000 + at % RQ_ENTRIES ||
	    wc->byte_len != 64 + at % 8 || wc->opcode != IBV_WC_RECV)
		return "ibv_poll_cq gave another receive";
	if (is_of_packets(p))
		return wc->wc_flags == IBV_WC_IP_CSUM_OK ?
			       NULL :
			       "ibv_poll_cq gave other checksums";
	if (wc->imm_data != htobe32(0x01020304) || wc->src_qp != 0x777 ||
	    wc->wc_flags != IBV_WC_WITH_IMM)
		return "ibv_poll_cq gave other fields than the device's";
	return NULL;
}

static const char *check_poll(struct bench *b, struct queues *q,
			      const struct row *row)
{
	unsigned int want = row->ready == NOTHING ? 0 : row->batch;

	memset(b->wc, 0, sizeof(b->wc));
	if (ibv_poll_cq(q->cq, row->batch, b->wc) != (int)want)
		return "ibv_poll_cq returned another number of completions";
	for (unsigned int i = 0; i < want; i++) {
		const struct ibv_wc *wc = &b->wc[i];
		const struct pair *p = &q->pair;
		/* As many have been received as will be polled. */
		unsigned int before = want - i;
		const char *wrong;

		if (row->ready == SENT) {
			if (wc->status || wc->qp_num != p->qp->qp_num ||
			    wc->opcode != IBV_WC_SEND || wc->wr_id != REQUESTS - 1)
				return "ibv_poll_cq gave another send";
			continue;
		}
		if (row->ready == RECEIVED_MANY ||
		    row->ready == RECEIVED_THOUSAND) {
			/* One of each: a batch is less than a turn of all. */
			p = whose_turn(row->ready == RECEIVED_MANY ?
					       &q->many : &q->thousand, before);
			before = 1;
		} else if (row->ready == RECEIVED_SHARED) {
			p = &q->shared;
		} else if (row->ready == RECEIVED_PACKETS) {
			p = &q->packets;
		}
		wrong = check_received(wc, p, p->received - before);
		if (wrong)
			return wrong;
	}
	if ((be32toh(q->device.object->records[0]) & 0xffffff) !=
	    (q->device.written & 0xffffff))
		return "ibv_poll_cq left another consumer index";
	return NULL;
}

static const char *check_cursor(struct bench *b, struct queues *q,
				const struct row *row)
{
	struct ibv_poll_cq_attr attr = {};
	uint32_t at = q->cursor.received - row->batch;
	unsigned int n = 0;

	(void)b;
	if (ibv_start_poll(q->cqx, &attr))
		return "ibv_start_poll found nothing";
	do {
		if (q->cqx->wr_id != 1000 + at % RQ_ENTRIES || q->cqx->status ||
		    ibv_wc_read_opcode(q->cqx) != IBV_WC_RECV ||
		    ibv_wc_read_byte_len(q->cqx) != 64 + at % 8 ||
		    ibv_wc_read_imm_data(q->cqx) != htobe32(0x01020304) ||
		    ibv_wc_read_qp_num(q->cqx) != q->cursor.qp->qp_num ||
		    ibv_wc_read_wc_flags(q->cqx) != IBV_WC_WITH_IMM) {
			ibv_end_poll(q->cqx);
			return "the cursor gave other fields than the device's";
		}
		at++;
	} while (++n < row->batch && !ibv_next_poll(q->cqx));
	ibv_end_poll(q->cqx);
	if (n != row->batch)
		return "the cursor found too few completions";
	return NULL;
}

/* ---- send and receive queues ---- */

static inline void wr_list(struct bench *b, struct ibv_qp *base,
			   unsigned int calls, unsigned int batch,
			   bool inline_data)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(base);

	for (unsigned int i = 0; i < calls; i++) {
		ibv_wr_start(qp);
		for (unsigned int j = REQUESTS - batch; j < REQUESTS; j++) {
			qp->wr_id = j;
			qp->wr_flags = IBV_SEND_SIGNALED;
			ibv_wr_send(qp);
			if (inline_data)
				ibv_wr_set_inline_data(qp, b->buffer,
						       INLINE_LENGTH);
			else
				ibv_wr_set_sge(qp, b->sge[j].lkey,
					       b->sge[j].addr,
					       b->sge[j].length);
		}
		if (ibv_wr_complete(qp))
			b->sink++;
	}
}

#define WR(name, batch, inline_data)                                    \
	static void name(struct bench *b, struct queues *q,             \
			 unsigned int calls)                            \
	{                                                               \
		wr_list(b, q->extended.qp, calls, batch, inline_data);  \
	}
WR(run_wr, 1, false)
WR(run_wr_batch, BATCH, false)
WR(run_wr_inline, 1, true)
WR(run_wr_inline_batch, BATCH, true)

/* What the device reads of the entries of a SEND. */
static const char *check_sent(struct bench *b, const struct pair *p,
			      const struct row *row)
{
	bool inline_data = strstr(row->name, "inline") != NULL;

	if (posted(p->object, MLX5_SND_DBR, p->sent) != row->batch)
		return "the post left another doorbell record";
	for (unsigned int i = 0; i < row->batch; i++) {
		const uint8_t *block = device_send_block(p->object,
							 p->sent + i);
		const struct mlx5_wqe_ctrl_seg *control = (const void *)block;
		const struct mlx5_wqe_data_seg *data =
			(const void *)(block + 16);
		uint32_t segments = inline_data ? 4 : 2;

		if (be32toh(control->opmod_idx_opcode) !=
			    (((p->sent + i) & 0xffff) << 8 | MLX5_OPCODE_SEND) ||
		    be32toh(control->qpn_ds) !=
			    (p->qp->qp_num << 8 | segments) ||
		    control->fm_ce_se != MLX5_WQE_CTRL_CQ_UPDATE)
			return "a send entry has another control segment";
		if (inline_data) {
			if (be32toh(data->byte_count) !=
				    (INLINE_LENGTH | MLX5_INLINE_SEG) ||
			    memcmp(block + 20, b->buffer, INLINE_LENGTH))
				return "a send entry has other inline data";
		} else if (be32toh(data->byte_count) != INLINE_LENGTH ||
			   be32toh(data->lkey) != b->mr->lkey ||
			   be64toh(data->addr) != (uintptr_t)b->buffer) {
			return "a send entry has another element";
		}
	}
	return NULL;
}

static const char *check_send(struct bench *b, struct queues *q,
			      const struct row *row)
{
	row->run(b, q, 1);
	return check_sent(b, &q->pair, row);
}

static const char *check_wr(struct bench *b, struct queues *q,
			    const struct row *row)
{
	row->run(b, q, 1);
	return check_sent(b, &q->extended, row);
}

static void post_packets(struct queues *q, struct ibv_send_wr *list,
			 unsigned int calls)
{
	struct ibv_send_wr *bad;

	for (unsigned int i = 0; i < calls; i++) {
		ibv_post_send(q->packets.qp, list, &bad);
		BARRIER();
	}
}

static void run_packet(struct bench *b, struct queues *q, unsigned int calls)
{
	post_packets(q, LAST(b->send), calls);
}

static void run_packet_batch(struct bench *b, struct queues *q,
			     unsigned int calls)
{
	post_packets(q, LAST_OF(b->send, BATCH), calls);
}

static void run_packet_large(struct bench *b, struct queues *q,
			     unsigned int calls)
{
	post_packets(q, b->send, calls);
}

static void run_poll_large(struct bench *b, struct queues *q,
			   unsigned int calls)
{
	for (unsigned int i = 0; i < calls; i++) {
		ibv_poll_cq(q->cq, LARGE_BATCH, b->wc);
		BARRIER();
	}
}

/* What the device reads of the entries of packets. */
static const char *check_packet(struct bench *b, struct queues *q,
				const struct row *row)
{
	static const uint8_t no_offloads[16];
	const struct pair *p = &q->packets;

	row->run(b, q, 1);
	if (posted(p->object, MLX5_SND_DBR, p->sent) != row->batch)
		return "the post of packets left another doorbell record";
	for (unsigned int i = 0; i < row->batch; i++) {
		const uint8_t *block = device_send_block(p->object,
							 p->sent + i);
		const struct mlx5_wqe_ctrl_seg *control = (const void *)block;
		const struct mlx5_wqe_data_seg *data =
			(const void *)(block + 32);

		if (be32toh(control->qpn_ds) != (p->qp->qp_num << 8 | 3) ||
		    memcmp(block + 16, no_offloads, 16) ||
		    be32toh(data->byte_count) != INLINE_LENGTH ||
		    be32toh(data->lkey) != b->mr->lkey ||
		    be64toh(data->addr) != (uintptr_t)b->buffer)
			return "a packet has another entry";
	}
	return NULL;
}

/* What the device reads of a receive. */
static bool is_the_receive(const struct bench *b, const uint8_t *element)
{
	const struct mlx5_wqe_data_seg *data = (const void *)element;

	return be32toh(data->byte_count) == INLINE_LENGTH &&
	       be32toh(data->lkey) == b->mr->lkey &&
	       be64toh(data->addr) == (uintptr_t)b->buffer;
}

static const char *check_recv(struct bench *b, struct queues *q,
			      const struct row *row)
{
	const struct pair *p = &q->pair;

	row->run(b, q, 1);
	if (outstanding(p) != row->batch)
		return "ibv_post_recv left another doorbell record";
	for (unsigned int i = 0; i < row->batch; i++)
		if (!is_the_receive(b, device_recv_entry(p->object,
							 p->received + i)))
			return "a receive entry has another element";
	return NULL;
}

static void post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *list,
			  unsigned int calls)
{
	struct ibv_recv_wr *bad;

	for (unsigned int i = 0; i < calls; i++) {
		ibv_post_srq_recv(srq, list, &bad);
		BARRIER();
	}
}

static void run_srq_recv(struct bench *b, struct queues *q, unsigned int calls)
{
	post_srq_recv(q->shared.srq, LAST(b->recv), calls);
}

static void run_srq_recv_batch(struct bench *b, struct queues *q,
			       unsigned int calls)
{
	post_srq_recv(q->shared.srq, LAST_OF(b->recv, BATCH), calls);
}

/* A whole round: as much as is posted before any of it completes. */
static const char *check_srq_recv(struct bench *b, struct queues *q,
				  const struct row *row)
{
	const struct pair *p = &q->shared;
	uint32_t count = row->calls * row->batch;
	uint16_t slot = p->slot;

	row->run(b, q, row->calls);
	if (outstanding(p) != count)
		return "ibv_post_srq_recv left another doorbell record";
	for (uint32_t i = 0; i < count; i++) {
		uint8_t *element = device_shared_entry(p->receives, slot) + 16;

		if (!is_the_receive(b, element))
			return "a shared queue's entry has another element";
		/* So that a list which comes back to it is seen. */
		memset(element, 0, 16);
		slot = device_shared_next(p->receives, slot);
	}
	return NULL;
}

/* ---- a provider that does nothing ---- */

/* What libibverbs has behind the queue pair (struct verbs_qp), somewhere: that it
 * is one for ibv_wr_* (VERBS_QP_EX). */
struct empty_qp {
	struct ibv_qp_ex qp;
	uint32_t is_extended[16];
};

struct queues *empty_queues(void)
{
	static struct ibv_context context;
	static struct ibv_cq cq;
	static struct ibv_cq_ex cqx;
	static struct empty_qp qp;
	static struct mlx5dv_qp_ex functions;
	static struct ibv_srq srq;
	static struct queues queues;
	mlx5_empty_fn set =
		(mlx5_empty_fn)(uintptr_t)dlsym(RTLD_DEFAULT, "mlx5_empty");

	if (!set)
		die("preload mlx5_standin.so (LD_PRELOAD)");
	set(&context, &cqx, &qp.qp, &functions);
	cq.context = &context;
	qp.qp.qp_base.context = &context;
	srq.context = &context;
	for (unsigned int i = 0; i < 16; i++)
		qp.is_extended[i] = 1 << 1;
	queues.cq = &cq;
	queues.cqx = &cqx;
	queues.pair.qp = &qp.qp.qp_base;
	queues.extended.qp = &qp.qp.qp_base;
	queues.shared.srq = &srq;
	queues.packets.qp = &qp.qp.qp_base;
	queues.dynamic.qp = queues.keys.qp = &qp.qp.qp_base;
	queues.dynamic.functions = queues.keys.functions = &functions;
	if (ibv_qp_to_qp_ex(queues.extended.qp) != &qp.qp)
		die("libibverbs finds no extended queue pair");
	return &queues;
}

/* ---- the table ---- */

#define ROWS(prefix, users)                                                   \
	{ prefix "poll-recv/1", 1, 112, users, RECEIVED, run_poll,            \
	  check_poll },                                                       \
	{ prefix "poll-recv/16", BATCH, 7, users, RECEIVED, run_poll_batch,   \
	  check_poll },                                                       \
	{ prefix "poll-send/1", 1, 112, users, SENT, run_poll, check_poll },  \
	{ prefix "poll-send/16", BATCH, 7, users, SENT, run_poll_batch,       \
	  check_poll },                                                       \
	{ prefix "poll-empty/1", 1, 112, users, NOTHING, run_poll,            \
	  check_poll },                                                       \
	{ prefix "cursor/1", 1, 112, users, RECEIVED_CURSOR, run_cursor,      \
	  check_cursor },                                                     \
	{ prefix "cursor/16", BATCH, 7, users, RECEIVED_CURSOR,               \
	  run_cursor_batch, check_cursor },                                   \
	{ prefix "send/1", 1, 112, users, SQ_EMPTY, run_send, check_send },   \
	{ prefix "send/16", BATCH, 7, users, SQ_EMPTY, run_send_batch,        \
	  check_send },                                                       \
	{ prefix "send-inline/1", 1, 112, users, SQ_EMPTY, run_inline,        \
	  check_send },                                                       \
	{ prefix "send-inline/16", BATCH, 7, users, SQ_EMPTY,                 \
	  run_inline_batch, check_send },                                     \
	{ prefix "recv/1", 1, 112, users, RQ_EMPTY, run_recv, check_recv },   \
	{ prefix "recv/16", BATCH, 7, users, RQ_EMPTY, run_recv_batch,        \
	  check_recv },                                                       \
	{ prefix "srq-recv/1", 1, 112, users, SRQ_EMPTY, run_srq_recv,        \
	  check_srq_recv },                                                   \
	{ prefix "srq-recv/16", BATCH, 7, users, SRQ_EMPTY,                   \
	  run_srq_recv_batch, check_srq_recv },                               \
	{ prefix "poll-srq/1", 1, 112, users, RECEIVED_SHARED, run_poll,      \
	  check_poll },                                                       \
	{ prefix "poll-srq/16", BATCH, 7, users, RECEIVED_SHARED,             \
	  run_poll_batch, check_poll },                                       \
	{ prefix "poll-many/1", 1, 112, users, RECEIVED_MANY, run_poll,       \
	  check_poll },                                                       \
	{ prefix "poll-many/16", BATCH, 7, users, RECEIVED_MANY,              \
	  run_poll_batch, check_poll },                                       \
	{ prefix "wr-send/1", 1, 112, users, SQX_EMPTY, run_wr, check_wr },   \
	{ prefix "wr-send/16", BATCH, 7, users, SQX_EMPTY, run_wr_batch,      \
	  check_wr },                                                         \
	{ prefix "wr-inline/1", 1, 112, users, SQX_EMPTY, run_wr_inline,      \
	  check_wr },                                                         \
	{ prefix "wr-inline/16", BATCH, 7, users, SQX_EMPTY,                  \
	  run_wr_inline_batch, check_wr }

const struct row rows[] = {
	ROWS("", ANY),
	{ "packet/1", 1, 112, ANY, PACKETS_EMPTY, run_packet, check_packet },
	{ "packet/16", BATCH, 7, ANY, PACKETS_EMPTY, run_packet_batch,
	  check_packet },
	{ "packet/64", LARGE_BATCH, 1, ANY, PACKETS_EMPTY, run_packet_large,
	  check_packet },
	{ "poll-packet/1", 1, 112, ANY, RECEIVED_PACKETS, run_poll,
	  check_poll },
	{ "poll-packet/16", BATCH, 7, ANY, RECEIVED_PACKETS, run_poll_batch,
	  check_poll },
	{ "poll-packet/64", LARGE_BATCH, 1, ANY, RECEIVED_PACKETS,
	  run_poll_large, check_poll },
	{ "dc-send/1", 1, 112, ANY, DYNAMIC_EMPTY, run_dynamic,
	  check_dynamic },
	{ "dc-send/16", BATCH, 7, ANY, DYNAMIC_EMPTY, run_dynamic_batch,
	  check_dynamic },
	{ "dc-send/64", LARGE_BATCH, 1, ANY, DYNAMIC_EMPTY, run_dynamic_large,
	  check_dynamic },
	{ "key-configure/1", 1, 112, ANY, KEYS_EMPTY, run_key_configure,
	  check_key },
	{ "key-configure/16", BATCH, 7, ANY, KEYS_EMPTY,
	  run_key_configure_batch, check_key },
	{ "key-list/1", 1, 112, ANY, KEYS_EMPTY, run_key_list, check_key },
	{ "key-list/16", BATCH, 7, ANY, KEYS_EMPTY, run_key_list_batch,
	  check_key },
	{ "key-interleaved/1", 1, 112, ANY, KEYS_EMPTY, run_key_interleaved,
	  check_key },
	{ "key-interleaved/16", BATCH, 7, ANY, KEYS_EMPTY,
	  run_key_interleaved_batch, check_key },
	{ "poll-thousand/1", 1, 112, ANY, RECEIVED_THOUSAND, run_poll,
	  check_poll },
	{ "poll-thousand/16", BATCH, 7, ANY, RECEIVED_THOUSAND, run_poll_batch,
	  check_poll },
	ROWS("single-", SINGLE),
	ROWS("several-", SEVERAL),
};
const unsigned int nrows = sizeof(rows) / sizeof(rows[0]);

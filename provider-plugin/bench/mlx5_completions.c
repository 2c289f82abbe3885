/* SPDX-License-Identifier: MIT */
/*
 * What a provider makes of completions, printed: errors of every syndrome, data
 * that comes in the completion, several told together, events between arming.
 * As mlx5_bytes.c: the program is run with the stock provider and with ours on the
 * same stand-in, and `cargo xtask bytes` compares.
 *
 *   mlx5_completions SHAPE
 *
 * SHAPE is what entries look like: "64", "128", "compressed" or
 * "128,compressed". The stock provider has no reader of compressed completions; it
 * is told the same ones one by one.
 *
 *   provider PATH
 *   case SHAPE NUMBER WHAT
 *   completion N ...     what ibv_poll_cq gave
 *   from N ...           of a receive: what it says of the sender
 *   data HEX             the memory that the work request names, as it is after
 *   consumed RECORD      the completion queue's doorbell record
 *   armed RECORD HEX     its other one, and the register
 */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mlx5_device.h"

#define ARM_AT 0x20
#define CONSUMED 0
#define ARMED 1
#define DEPTH 32
#define SGES 4
#define DATA_BYTES 96
#define UNTOUCHED 0xee

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *region;
static uint8_t data[DATA_BYTES];
static const char *shape;
static uint64_t next_id;

/* A queue pair on a completion queue of its own. */
struct subject {
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_srq *srq;
	const struct mlx5_object *object;
	struct device_cq completions;
	uint32_t sent, received; /* blocks and receives that were posted, ever */
	uint16_t next_slot;	 /* of the shared queue */
};

static struct subject own, shared;

static void print_case(const char *what)
{
	static unsigned int counter;

	printf("case %s %u %s\n", shape, counter++, what);
}

/* ---- posting ---- */

/* The list's elements lie in `data` with a gap of a byte between them. */
static unsigned int make_list(struct ibv_sge *sges, const uint32_t *lengths,
			      unsigned int count)
{
	uint32_t at = 1;

	for (unsigned int i = 0; i < count; i++) {
		sges[i] = (struct ibv_sge){
			.addr = (uintptr_t)data + at,
			.length = lengths[i],
			.lkey = region->lkey,
		};
		at += lengths[i] + 1;
	}
	if (at > DATA_BYTES)
		die("a list of %u bytes", at);
	return count;
}

/* The block where it begins. */
static uint32_t post_send(struct subject *s, enum ibv_wr_opcode opcode,
			  unsigned int flags, const uint32_t *lengths,
			  unsigned int count)
{
	struct ibv_sge sges[SGES];
	struct ibv_send_wr *bad, wr = {
		.wr_id = 0x1000 + next_id++,
		.sg_list = sges,
		.num_sge = make_list(sges, lengths, count),
		.opcode = opcode,
		.send_flags = flags,
	};
	uint32_t at = s->sent;
	int err;

	/* The same place for both kinds of operands. */
	wr.wr.atomic.remote_addr = 0x8000;
	wr.wr.rdma.remote_addr = 0x8000;
	err = ibv_post_send(s->qp, &wr, &bad);
	if (err)
		die("ibv_post_send: %s", strerror(err));
	s->sent += (be32toh(s->object->records[MLX5_SND_DBR]) - s->sent) &
		   0xffff;
	return at;
}

/* The slot that the device takes from the shared queue next. */
static uint16_t next_shared(struct subject *s)
{
	uint16_t slot = s->next_slot;

	s->next_slot = device_shared_next(device_srq(s->srq), slot);
	return slot;
}

/* The slot that it is in. */
static uint16_t post_receive(struct subject *s, const uint32_t *lengths,
			     unsigned int count)
{
	struct ibv_sge sges[SGES];
	struct ibv_recv_wr *bad, wr = {
		.wr_id = 0x2000 + next_id++,
		.sg_list = sges,
		.num_sge = make_list(sges, lengths, count),
	};
	int err = s->srq ? ibv_post_srq_recv(s->srq, &wr, &bad) :
			   ibv_post_recv(s->qp, &wr, &bad);

	if (err)
		die("a receive: %s", strerror(err));
	return s->srq ? next_shared(s) : s->received++;
}

/* ---- reading ---- */

static void print_polled(struct subject *s, int most)
{
	struct ibv_wc wc[DEPTH];
	int n;

	/* What a provider leaves out is 0. */
	memset(wc, 0, sizeof(wc));
	n = ibv_poll_cq(s->cq, most, wc);
	for (int i = 0; i < n; i++) {
		bool receive = wc[i].opcode & IBV_WC_RECV;

		printf("completion %d %016lx status %d number %u", i,
		       wc[i].wr_id, wc[i].status, wc[i].qp_num);
		if (wc[i].status) {
			printf(" vendor %u\n", wc[i].vendor_err);
			continue;
		}
		printf(" opcode %d bytes %u flags %u extra %08x\n",
		       wc[i].opcode, wc[i].byte_len, wc[i].wc_flags,
		       receive && wc[i].wc_flags & (IBV_WC_WITH_IMM | IBV_WC_WITH_INV) ?
			       be32toh(wc[i].imm_data) : 0);
		if (receive)
			printf("from %d %06x lid %u service %u bits %u key %u\n",
			       i, wc[i].src_qp, wc[i].slid, wc[i].sl,
			       wc[i].dlid_path_bits, wc[i].pkey_index);
	}
	if (n < 0)
		printf("completion error %d\n", n);
	printf("consumed %08x\n",
	       be32toh(s->completions.object->records[CONSUMED]));
}

static void print_data(void)
{
	fputs("data ", stdout);
	for (unsigned int i = 0; i < DATA_BYTES; i++) {
		if (data[i] == UNTOUCHED)
			fputs("--", stdout);
		else
			printf("%02x", data[i]);
	}
	putchar('\n');
}

/* ---- the device's side ---- */

static struct mlx5_cqe64 failed(struct mlx5_cqe64 cqe, uint8_t syndrome,
				uint8_t vendor)
{
	struct mlx5_err_cqe *error = (struct mlx5_err_cqe *)(void *)&cqe;
	bool sent = cqe.op_own >> 4 == MLX5_CQE_REQ;

	error->syndrome = syndrome;
	error->vendor_err_synd = vendor;
	error->op_own = (sent ? MLX5_CQE_REQ_ERR : MLX5_CQE_RESP_ERR) << 4;
	return cqe;
}

/* With `bytes` bytes of data in it: in the first 32 of the fields, or in the 64
 * before them. */
static void complete_with_data(struct subject *s, struct mlx5_cqe64 cqe,
			       uint32_t bytes, bool wide)
{
	uint8_t before[64];

	for (unsigned int i = 0; i < sizeof(before); i++)
		before[i] = 0x40 + i;
	cqe.byte_cnt = htobe32(bytes);
	if (!wide) {
		memcpy(&cqe, before, 32);
		cqe.op_own |= MLX5_INLINE_SCATTER_32;
		device_complete(&s->completions, cqe);
		return;
	}
	cqe.op_own |= MLX5_INLINE_SCATTER_64;
	device_complete_wide(&s->completions, before, cqe);
}

/* ---- cases ---- */

static const uint32_t ONE[] = { 8 };

static void errors(struct subject *s)
{
	char what[64];

	for (unsigned int syndrome = 0; syndrome < 256; syndrome++) {
		uint32_t at = post_send(s, IBV_WR_SEND, IBV_SEND_SIGNALED, ONE, 1);
		uint16_t slot = post_receive(s, ONE, 1);
		uint8_t vendor = syndrome * 7 + 1;

		snprintf(what, sizeof(what), "%s: syndrome %u",
			 s->srq ? "shared" : "own", syndrome);
		print_case(what);
		device_complete(&s->completions,
				failed(device_sent(s->object, at), syndrome, vendor));
		device_complete(&s->completions,
				failed(device_received(s->object, slot, 0),
				       syndrome, vendor));
		print_polled(s, DEPTH);
	}
}

/* What the device finds in the shared queue. */
static void print_shared(struct subject *s, uint16_t slot)
{
	const struct mlx5_wqe_data_seg *list =
		(const void *)(device_shared_entry(device_srq(s->srq), slot) +
			       sizeof(struct mlx5_wqe_srq_next_seg));

	printf("posted %u:", be32toh(device_srq(s->srq)->records[0]) & 0xffff);
	for (unsigned int i = 0; i < SGES; i++) {
		if (list[i].lkey == htobe32(MLX5_INVALID_LKEY))
			break;
		printf(" %lu %u %s", be64toh(list[i].addr) - (uintptr_t)data,
		       be32toh(list[i].byte_count),
		       list[i].lkey == htobe32(region->lkey) ? "" : "other");
	}
	putchar('\n');
}

/* Receives whose memory was not there: they are posted again. */
static void given_back(struct subject *s)
{
	static const uint32_t lengths[] = { 8, 3 };
	enum { COUNT = 5, VENDOR_PAGE_FAULT = 0x93 };
	uint16_t slots[COUNT];
	char what[64];

	/* Alone, and before and behind others. */
	for (unsigned int faults = 0; faults < 1 << COUNT; faults++) {
		unsigned int most = faults % 3 ? DEPTH : 1;

		snprintf(what, sizeof(what), "shared: given back, %02x", faults);
		print_case(what);
		for (unsigned int i = 0; i < COUNT; i++)
			slots[i] = post_receive(s, lengths, 1 + i % 2);
		for (unsigned int i = 0; i < COUNT; i++) {
			struct mlx5_cqe64 cqe = device_received(s->object, slots[i], 0);

			device_complete(&s->completions,
					faults & 1 << i ?
						failed(cqe,
						       MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR,
						       VENDOR_PAGE_FAULT) :
						cqe);
		}
		for (unsigned int i = 0; i <= COUNT; i++)
			print_polled(s, most);
		for (unsigned int i = 0; i < COUNT; i++) {
			if (!(faults & 1 << i))
				continue;
			slots[i] = next_shared(s);
			print_shared(s, slots[i]);
			device_complete(&s->completions,
					device_received(s->object, slots[i], 0));
		}
		print_polled(s, DEPTH);
	}
}

/* Of several posted the second fails, and the rest is flushed. */
static void flushed(struct subject *s)
{
	uint32_t at[5];

	print_case("one fails, the rest is flushed");
	for (unsigned int i = 0; i < 5; i++)
		at[i] = post_send(s, IBV_WR_SEND, i == 0 ? 0 : IBV_SEND_SIGNALED,
				  ONE, 1);
	for (unsigned int i = 1; i < 5; i++)
		device_complete(&s->completions,
				failed(device_sent(s->object, at[i]),
				       i == 1 ? MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR :
						MLX5_CQE_SYNDROME_WR_FLUSH_ERR,
				       i));
	print_polled(s, 2);
	print_polled(s, DEPTH);
}

/* Every kind of receive, with everything that it says. */
static void kinds_of_receives(struct subject *s)
{
	static const uint8_t kinds[] = { MLX5_CQE_RESP_WR_IMM, MLX5_CQE_RESP_SEND,
					 MLX5_CQE_RESP_SEND_IMM,
					 MLX5_CQE_RESP_SEND_INV };
	char what[64];

	for (unsigned int i = 0; i < 16; i++) {
		uint16_t slot = post_receive(s, ONE, 1);
		struct mlx5_cqe64 cqe = device_received(s->object, slot, i);

		snprintf(what, sizeof(what), "receive of kind %u", i);
		print_case(what);
		/* Solicited or not. */
		cqe.op_own = kinds[i % 4] << 4 | (i & 8 ? 2 : 0);
		cqe.flags_rqpn = htobe32((i / 4) << 28 | i << 24 | (0x123450 + i));
		cqe.imm_inval_pkey = htobe32(0xa1b2c3d0 + i);
		cqe.slid = htobe16(0x700 + i);
		cqe.ml_path = 0x80 | i;
		device_complete(&s->completions, cqe);
		print_polled(s, DEPTH);
	}
}

struct list {
	uint32_t lengths[SGES];
	unsigned int count;
};

static const struct list lists[] = {
	{ { 32 }, 1 }, { { 5, 20, 40 }, 3 }, { { 10, 0, 4 }, 3 },
	{ { 1 }, 1 },  { { 60, 4 }, 2 },     { { 2, 3, 4, 5 }, 4 },
	{ { 64 }, 1 }, { { 0 }, 0 },
};

/* Whether a receive into the list may get so many bytes: the stock provider does
 * not look for the list's end, so more than fits only if it fills the entry. */
static bool fits(const struct subject *s, const struct list *list,
		 uint32_t bytes)
{
	uint32_t room = 0;

	for (unsigned int i = 0; i < list->count; i++)
		room += list->lengths[i];
	return bytes <= room ||
	       (!s->srq && list->count == SGES &&
		s->object->recv_shift == 6);
}

static void scattered(struct subject *s, bool wide)
{
	static const uint32_t bytes[] = { 0, 1, 5, 6, 14, 15, 25, 31, 32,
					  33, 60, 63, 64 };
	unsigned int sizes = wide ? sizeof(bytes) / sizeof(bytes[0]) : 9;
	char what[64];

	for (unsigned int l = 0; l < sizeof(lists) / sizeof(lists[0]); l++) {
		const struct list *list = &lists[l];

		for (unsigned int b = 0; b < sizes; b++) {
			for (unsigned int op = 0; op < 2; op++) {
				if (!op && !fits(s, list, bytes[b]))
					continue;
				snprintf(what, sizeof(what),
					 "%s: %u bytes in the completion of a %s, list %u",
					 s->srq ? "shared" : "own", bytes[b],
					 op ? "read" : "receive", l);
				print_case(what);
				memset(data, UNTOUCHED, sizeof(data));
				complete_with_data(
					s,
					op ? device_sent(s->object,
							 post_send(s, IBV_WR_RDMA_READ,
								   IBV_SEND_SIGNALED,
								   list->lengths,
								   list->count)) :
					     device_received(s->object,
							     post_receive(s, list->lengths,
									  list->count),
							     0),
					bytes[b], wide);
				print_polled(s, DEPTH);
				print_data();
			}
		}
	}
	for (unsigned int l = 0; l < 3; l++) {
		print_case("an atomic's old value in its completion");
		memset(data, UNTOUCHED, sizeof(data));
		complete_with_data(s,
				   device_sent(s->object,
					       post_send(s,
							 l ? IBV_WR_ATOMIC_FETCH_AND_ADD :
							     IBV_WR_ATOMIC_CMP_AND_SWP,
							 IBV_SEND_SIGNALED, ONE, 1)),
				   8, wide);
		print_polled(s, DEPTH);
		print_data();
	}
}

/* How many of them can be told together: of receives, those in slots that
 * follow each other. */
static unsigned int alike(const struct mlx5_cqe64 *cqes, unsigned int count)
{
	unsigned int n = 1;

	while (n < count &&
	       (cqes[0].op_own >> 4 == MLX5_CQE_REQ ||
		be16toh(cqes[n].wqe_counter) ==
			(uint16_t)(be16toh(cqes[n - 1].wqe_counter) + 1)))
		n++;
	return n;
}

/* Told together where the queue can, and else one by one. */
static void together(struct subject *s, const struct mlx5_cqe64 *cqes,
		     unsigned int count)
{
	while (count) {
		unsigned int n = s->completions.object->compresses ?
					 alike(cqes, count) : 1;

		if (n > 1)
			device_complete_together(&s->completions, cqes, n);
		else
			device_complete(&s->completions, cqes[0]);
		cqes += n;
		count -= n;
	}
}

/* Rows of every length, over the end of the queue many times; read at once or
 * in pieces; with one that is told by itself behind them. */
static void rows(struct subject *s, bool receives)
{
	static const enum ibv_wr_opcode opcodes[] = { IBV_WR_SEND, IBV_WR_RDMA_WRITE,
						      IBV_WR_RDMA_READ };
	struct mlx5_cqe64 cqes[DEPTH];
	char what[64];

	for (unsigned int count = 1; count <= 20; count++) {
		for (unsigned int piece = 1; piece <= DEPTH; piece += 7) {
			snprintf(what, sizeof(what), "%s: %u %s, read by %u",
				 s->srq ? "shared" : "own", count,
				 receives ? "receives" : "sends", piece);
			print_case(what);
			for (unsigned int i = 0; i <= count; i++) {
				if (receives) {
					cqes[i] = device_received(s->object,
								  post_receive(s, ONE, 1),
								  i * 3);
					cqes[i].op_own = MLX5_CQE_RESP_SEND_IMM << 4;
					cqes[i].imm_inval_pkey = htobe32(0x5000 + count);
				} else {
					cqes[i] = device_sent(s->object,
							      post_send(s, opcodes[i % 3],
									IBV_SEND_SIGNALED,
									ONE, 1));
				}
				cqes[i].timestamp = htobe64(count);
			}
			together(s, cqes, count);
			together(s, cqes + count, 1);
			for (unsigned int read = 0; read <= count; read += piece)
				print_polled(s, piece);
			print_polled(s, DEPTH);
		}
	}
}

/* The sequence number counts the events that were read. */
static void events(struct subject *s)
{
	char what[64];

	for (unsigned int i = 0; i < 12; i++) {
		uint8_t *at = s->completions.object->registers + ARM_AT;
		struct ibv_cq *cq;
		void *cq_context;
		int err;

		snprintf(what, sizeof(what), "arm after %u events", i);
		print_case(what);
		memset(at, 0, 8);
		err = ibv_req_notify_cq(s->cq, i % 3 == 1);
		printf("armed %d %08x ", err,
		       be32toh(s->completions.object->records[ARMED]));
		for (unsigned int j = 0; j < 8; j++)
			printf("%02x", at[j]);
		putchar('\n');
		device_complete(&s->completions,
				device_sent(s->object,
					    post_send(s, IBV_WR_SEND,
						      IBV_SEND_SIGNALED, ONE, 1)));
		device_event(&s->completions);
		if (ibv_get_cq_event(s->channel, &cq, &cq_context) || cq != s->cq)
			die("no event, or another queue's");
		ibv_ack_cq_events(cq, 1);
		/* Now and then it is armed with something left to read. */
		if (i % 4)
			print_polled(s, DEPTH);
	}
	print_case("after the events");
	print_polled(s, DEPTH);
}

/* ---- a queue pair ---- */

static struct subject make(bool is_shared)
{
	struct subject s = {};
	struct ibv_srq_init_attr srq = {
		.attr = { .max_wr = DEPTH - 1, .max_sge = SGES },
	};
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH,
			 .max_send_sge = SGES, .max_recv_sge = SGES },
		.qp_type = IBV_QPT_RC,
		/* As what the device puts into completions of this side's. */
		.sq_sig_all = 0,
	};

	s.channel = ibv_create_comp_channel(context);
	if (!s.channel)
		die("ibv_create_comp_channel: %s", strerror(errno));
	s.cq = ibv_create_cq(context, DEPTH - 1, NULL, s.channel, 0);
	if (!s.cq)
		die("ibv_create_cq: %s", strerror(errno));
	s.completions = device_cq(s.cq);
	if (is_shared) {
		s.srq = ibv_create_srq(pd, &srq);
		if (!s.srq)
			die("ibv_create_srq: %s", strerror(errno));
		attr.srq = s.srq;
		attr.cap.max_recv_wr = attr.cap.max_recv_sge = 0;
	}
	attr.send_cq = attr.recv_cq = s.cq;
	s.qp = ibv_create_qp(pd, &attr);
	if (!s.qp)
		die("ibv_create_qp: %s", strerror(errno));
	s.object = device_qp(s.qp);
	device_ready(s.qp, MLX5_PORT_INFINIBAND);
	return s;
}

int main(int argc, char **argv)
{
	bool wide;

	if (argc != 2)
		die("what entries look like is missing");
	setvbuf(stdout, NULL, _IOLBF, 0);
	shape = argv[1];
	wide = strstr(shape, "128");
	/* As each provider is told. */
	setenv("MLX5_CQE_SIZE", wide ? "128" : "64", 1);
	setenv("MLX5_DEBUG_FILE", "/dev/null", 1);
	context = device_open();
	printf("provider %s\n", device_provider(context));
	pd = ibv_alloc_pd(context);
	if (!pd)
		die("ibv_alloc_pd: %s", strerror(errno));
	region = ibv_reg_mr(pd, data, sizeof(data), IBV_ACCESS_LOCAL_WRITE);
	if (!region)
		die("ibv_reg_mr: %s", strerror(errno));
	own = make(false);
	shared = make(true);
	if (own.completions.object->cqe_bytes != (wide ? 128 : 64))
		die("entries of %u bytes", own.completions.object->cqe_bytes);
	errors(&own);
	errors(&shared);
	given_back(&shared);
	flushed(&own);
	kinds_of_receives(&own);
	kinds_of_receives(&shared);
	scattered(&own, false);
	scattered(&shared, false);
	if (wide) {
		scattered(&own, true);
		scattered(&shared, true);
	}
	rows(&own, false);
	rows(&own, true);
	rows(&shared, true);
	events(&own);
	return 0;
}

/* SPDX-License-Identifier: MIT */
/*
 * What a provider writes for a corpus of work requests: the bytes of the
 * queues, doorbell records and registers, printed. The program is run with the
 * stock provider and with ours on the same stand-in (mlx5_standin.c), and
 * `cargo xtask bytes` compares what it prints.
 *
 * Before each post the queues and the register are filled with a pattern; a
 * word that has it still is printed as "--------". Each case is a header line and
 * then one line for each thing that the device would see:
 *
 *   provider PATH
 *   case KIND NUMBER WHAT
 *   sizes ...            what a queue pair was told it holds
 *   posted ERRNO BAD BLOCKS RECORD   of a post: the result, the index of the
 *                        refused request, the blocks that the doorbell record
 *                        moved by, and the record
 *   entry N HEX          a work request, from its first block on, as the device
 *                        reads it: over the end of the queue
 *   stray BLOCK          a block that the post wrote outside of what it handed
 *                        over, counted from there
 *   register WHICH HEX   the bytes of half a BlueFlame register: of "this", whose
 *                        turn it is, or of the "other"
 *   receives ERRNO BAD RECORD, receive N HEX, shared N HEX
 *   completion ...       what ibv_poll_cq gave for it
 *   consumed RECORD      the completion queue's doorbell record
 *   armed RECORD HEX     its other one, and the register
 */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "mlx5_bytes.h"
#include "mlx5_own.h"

#define POSTS 48
#define RECEIVES 12
#define ENTRY_BLOCKS 16 /* of 64 segments */
#define ARM_AT 0x20
/* A completion queue's doorbell records. */
#define CONSUMED 0
#define ARMED 1

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *region;
static uint32_t post_counter;

/* ---- patterns and hex ---- */

/* Of memory that is filled: by what it is, and where in it. */
enum filled { QUEUE = 91, REGISTER = 174 };

static uint8_t pattern(enum filled filled, size_t at)
{
	return (at * 167 + filled) ^ (at >> 8);
}

static void fill(enum filled filled, uint8_t *to, size_t offset, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		to[i] = pattern(filled, offset + i);
}

static bool untouched(enum filled filled, const uint8_t *at, size_t offset,
		      size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		if (at[i] != pattern(filled, offset + i))
			return false;
	return true;
}

/* `offset` is where the bytes are in what was filled. */
static void print_hex(enum filled filled, const uint8_t *at, size_t offset,
		      size_t bytes)
{
	for (size_t i = 0; i < bytes; i += 4) {
		if (untouched(filled, at + i, offset + i, 4))
			fputs("--------", stdout);
		else
			for (size_t j = i; j < i + 4; j++)
				printf("%02x", at[j]);
	}
}

/* ---- sending ---- */

/* Filled from where the next post begins: queues are not of the same size with
 * every provider, so the place in the queue would not do. */
static void fill_send_queue(const struct subject *s)
{
	for (uint32_t i = 0; i < s->object->send_blocks; i++)
		fill(QUEUE, device_send_block(s->object, s->posted + i),
		     i * BLOCK, BLOCK);
}

void before_post(const struct subject *s)
{
	fill_send_queue(s);
	fill(REGISTER, s->object->blue_flame, 0, 2 * MLX5_HALF);
}

uint32_t send_record(const struct subject *s)
{
	return be32toh(s->object->records[MLX5_SND_DBR]);
}

static unsigned int blocks_of(const struct subject *s, uint32_t index)
{
	const struct mlx5_wqe_ctrl_seg *control =
		(const void *)device_send_block(s->object, index);
	unsigned int segments = be32toh(control->qpn_ds) & 0x3f;

	return (segments * 16 + BLOCK - 1) / BLOCK;
}

static void print_entry(const struct subject *s, uint32_t index,
			unsigned int blocks)
{
	for (unsigned int i = 0; i < blocks; i++)
		print_hex(QUEUE, device_send_block(s->object, index + i),
			  (index + i - s->posted) * BLOCK, BLOCK);
	putchar('\n');
}

/* Whose turn a register's halves are: queue pairs may share it, which ones is
 * not the same with every provider. */
static unsigned int *turn_of(const struct mlx5_object *qp)
{
	static struct {
		const uint8_t *register_at;
		unsigned int turn;
	} turns[64];

	for (unsigned int i = 0; i < 64; i++) {
		if (!turns[i].register_at)
			turns[i].register_at = qp->blue_flame;
		if (turns[i].register_at == qp->blue_flame)
			return &turns[i].turn;
	}
	die("too many registers");
}

static void print_registers(const struct subject *s)
{
	unsigned int *turn = turn_of(s->object);

	for (unsigned int half = 0; half < 2; half++) {
		size_t at = half * MLX5_HALF;
		unsigned int bytes = MLX5_HALF;

		uint8_t *half_at = s->object->blue_flame + at;

		if (untouched(REGISTER, half_at, at, MLX5_HALF))
			continue;
		while (untouched(REGISTER, half_at + bytes - 8, at + bytes - 8,
				 8))
			bytes -= 8;
		printf("register %s ", half == *turn ? "this" : "other");
		print_hex(REGISTER, half_at, at, bytes);
		putchar('\n');
	}
}

static void print_completions(struct subject *s)
{
	struct ibv_wc wc[MOST_REQUESTS];
	int n;

	/* What a provider leaves out is 0. */
	memset(wc, 0, sizeof(wc));
	n = ibv_poll_cq(s->cq, MOST_REQUESTS, wc);

	for (int i = 0; i < n; i++) {
		printf("completion %016lx status %d", wc[i].wr_id,
		       wc[i].status);
		if (!wc[i].status)
			printf(" opcode %d bytes %u flags %u source %u",
			       wc[i].opcode, wc[i].byte_len, wc[i].wc_flags,
			       wc[i].opcode & IBV_WC_RECV ? wc[i].src_qp : 0);
		printf(" number %u\n", wc[i].qp_num);
	}
	printf("consumed %08x\n",
	       be32toh(s->completions.object->records[CONSUMED]));
	if (n < 0)
		printf("completion error %d\n", n);
}

unsigned int take_sends(struct subject *s, bool print, uint32_t *last)
{
	uint32_t end = s->posted +
		       ((send_record(s) - s->posted) & 0xffff);
	uint32_t at = s->posted;
	unsigned int n = 0;

	while (at != end) {
		unsigned int blocks = blocks_of(s, at);

		if (blocks == 0 || blocks > end - at) {
			printf("entry %u leads nowhere\n", n);
			break;
		}
		if (print) {
			printf("entry %u ", n);
			print_entry(s, at, blocks);
		}
		n++;
		*last = at;
		at += blocks;
	}
	if (print) {
		for (uint32_t i = end - s->posted;
		     i < s->object->send_blocks; i++)
			if (!untouched(QUEUE,
				       device_send_block(s->object,
							 s->posted + i),
				       i * BLOCK, BLOCK))
				printf("stray %u\n", i - (end - s->posted));
		print_registers(s);
	}
	if (n)
		*turn_of(s->object) ^= 1;
	s->posted = end;
	return n;
}

/* Takes over what was posted; the completion of the last completes all. */
static void complete_sends(struct subject *s, bool print)
{
	uint32_t last;

	if (take_sends(s, print, &last))
		device_complete(&s->completions, device_sent(s->object, last));
}

/* A refusal leaves the protection of keys in any state. */
static void recover(struct subject *s)
{
	struct ibv_wc wc[4];

	if (own_recover(s->qp))
		die("keys cannot be configured");
	complete_sends(s, false);
	ibv_poll_cq(s->cq, 4, wc);
}

static void post(struct subject *s, struct request *requests,
		 unsigned int count)
{
	uint32_t before = send_record(s);
	int bad, err;

	before_post(s);
	err = post_requests(s->qp, s->kind, requests, count, &bad);
	printf("posted %d %d %u %08x\n", err, bad,
	       (send_record(s) - before) & 0xffff, send_record(s));
	complete_sends(s, true);
	print_completions(s);
	if (err && s->kind->protects)
		recover(s);
}

void print_case(const struct subject *s, const char *what)
{
	printf("case %s %u %s", s->kind->name, post_counter++, what);
}

static void random_post(struct subject *s)
{
	struct request requests[MOST_REQUESTS];
	/* One alone as often as a list: it may be written to the register. */
	unsigned int count = number_in(&s->numbers, 0, 2) ?
				     1 :
				     number_in(&s->numbers, 2,
					       MOST_REQUESTS + 1);

	print_case(s, "post");
	for (unsigned int i = 0; i < count; i++) {
		/* Of those that are several entries each, alike. */
		do
			requests[i] = make_request(&s->numbers, s->kind,
						   &s->material);
		while (s->kind->protects && count > 1 &&
		       (unsigned int)requests[i].opcode != OWN_PROTECT);
		printf(" %s/%u%s", opcode_name(requests[i].opcode),
		       requests[i].nsges,
		       requests[i].flags & IBV_SEND_INLINE ? "/inline" : "");
	}
	putchar('\n');
	post(s, requests, count);
}

/* One work request of every length of list: some just fit the register. */
static void every_length(struct subject *s)
{
	bool packet = s->kind->type == IBV_QPT_RAW_PACKET || s->kind->underlay;

	for (unsigned int n = packet; n <= s->kind->sges; n++) {
		struct request r = make_request(&s->numbers, s->kind,
						&s->material);

		print_case(s, "post send/");
		printf("%u\n", n);
		r.opcode = IBV_WR_SEND;
		r.flags = IBV_SEND_SIGNALED;
		r.nsges = n;
		for (unsigned int i = 0; i < n; i++)
			r.sges[i] = (struct ibv_sge){
				DATA_AT + i, i + 1 + (packet ? LEAST_FRAME : 0), n
			};
		post(s, &r, 1);
	}
}

/* Work requests that are refused; those before them are posted. */
static void refused_posts(struct subject *s)
{
	static const char *const what[] = { "too many elements",
					    "too much inline data",
					    "no such operation" };

	for (unsigned int which = 0; which < 3; which++) {
		struct request requests[2];

		/* The other interface has a function for each operation. */
		if (which == 2 && s->kind->extended)
			break;
		print_case(s, "refused: ");
		puts(what[which]);
		for (unsigned int i = 0; i < 2; i++) {
			requests[i] = make_request(&s->numbers, s->kind,
						   &s->material);
			requests[i].opcode = IBV_WR_SEND;
			requests[i].flags = IBV_SEND_SIGNALED;
			requests[i].nsges = 1;
			requests[i].sges[0] = (struct ibv_sge){
				DATA_AT, 4 + LEAST_FRAME, 1
			};
		}
		switch (which) {
		case 0:
			requests[1].nsges = s->kind->sges + 1;
			memset(requests[1].sges, 1, sizeof(requests[1].sges));
			break;
		case 1:
			requests[1].flags |= IBV_SEND_INLINE;
			requests[1].sges[0].length = 900;
			break;
		case 2:
			requests[1].opcode = (enum ibv_wr_opcode)77;
			break;
		}
		post(s, requests, 2);
	}
}

/* ---- receiving ---- */

static unsigned int make_receives(struct subject *s, struct ibv_recv_wr *list,
				  struct ibv_sge (*sges)[MOST_SGES])
{
	uint32_t most = s->kind->receives < MOST_REQUESTS ? s->kind->receives :
							     MOST_REQUESTS;
	unsigned int count = number_in(&s->numbers, 1, most + 1);

	for (unsigned int i = 0; i < count; i++)
		list[i] = (struct ibv_recv_wr){
			.wr_id = next_number(&s->numbers),
			.next = i + 1 < count ? &list[i + 1] : NULL,
			.sg_list = sges[i],
			.num_sge = make_list(&s->numbers, sges[i],
					     s->kind->recv_sges),
		};
	return count;
}

static void own_receives(struct subject *s, bool refused)
{
	uint32_t entry = 1u << s->object->recv_shift;
	struct ibv_sge sges[MOST_REQUESTS][MOST_SGES];
	struct ibv_recv_wr list[MOST_REQUESTS], *bad = NULL;
	unsigned int count = make_receives(s, list, sges);
	uint32_t end;
	int err;

	print_case(s, refused ? "receives, one refused\n" : "receives\n");
	if (refused)
		/* More than there is room for, not only than was asked for. */
		list[count - 1].num_sge = MOST_SGES;
	for (uint32_t i = 0; i < s->object->recv_entries; i++)
		fill(QUEUE, device_recv_entry(s->object, s->received + i),
		     i * entry, entry);
	err = ibv_post_recv(s->qp, list, &bad);
	printf("receives %d %d %08x\n", err,
	       err && bad ? (int)(bad - list) : -1,
	       be32toh(s->object->records[MLX5_RCV_DBR]));
	end = s->received + ((be32toh(s->object->records[MLX5_RCV_DBR]) -
			      s->received) & 0xffff);
	for (uint32_t i = 0; i < s->object->recv_entries; i++) {
		uint8_t *at = device_recv_entry(s->object, s->received + i);

		if (i >= end - s->received &&
		    untouched(QUEUE, at, i * entry, entry))
			continue;
		printf("receive %u ", i);
		print_hex(QUEUE, at, i * entry, entry);
		putchar('\n');
	}
	for (; s->received != end; s->received++)
		device_complete(&s->completions,
				device_received(s->object, s->received,
						40 + s->received % 50));
	print_completions(s);
}

static void shared_receives(struct subject *s, bool refused)
{
	struct ibv_sge sges[MOST_REQUESTS][MOST_SGES];
	struct ibv_recv_wr list[MOST_REQUESTS], *bad = NULL;
	unsigned int count = make_receives(s, list, sges), taken = 0;
	uint16_t slots[MOST_REQUESTS];
	uint32_t record, entry = 1u << s->shared->srq_shift;
	struct mlx5_object receiver = *s->object;
	int err;

	/* A queue of XRC is named itself, not who received. */
	if (s->kind->type == IBV_QPT_XRC_SEND)
		receiver.user_index = s->shared->user_index;

	print_case(s, refused ? "shared receives, one refused\n" :
				"shared receives\n");
	if (refused)
		list[count - 1].num_sge = MOST_SGES;
	/* All of them are free. */
	for (uint32_t i = 0; i < s->shared->entries; i++)
		fill(QUEUE, s->shared->buffer + i * entry + 16, 16,
		     entry - 16);
	err = ibv_post_srq_recv(s->srq, list, &bad);
	record = be32toh(s->shared->records[0]);
	printf("receives %d %d %08x\n", err,
	       err && bad ? (int)(bad - list) : -1, record);
	/* As the device goes from one to the next: which slot each is in depends
	 * on how many the provider has. */
	for (; (uint16_t)s->received != (uint16_t)record &&
	       taken < MOST_REQUESTS;
	     s->received++) {
		const uint8_t *at = device_shared_entry(s->shared,
							s->next_slot);

		printf("shared %u ", taken);
		/* The index of the next is followed, not printed. */
		for (uint32_t j = 0; j < 16; j++)
			if (j / 2 == 1)
				fputs("..", stdout);
			else
				printf("%02x", at[j]);
		print_hex(QUEUE, at + 16, 16, entry - 16);
		putchar('\n');
		slots[taken++] = s->next_slot;
		s->next_slot = device_shared_next(s->shared, s->next_slot);
	}
	/* They complete in any order. */
	for (unsigned int i = taken; i-- > 0;) {
		unsigned int which = number_in(&s->numbers, 0, i + 1);
		uint16_t slot = slots[which];

		slots[which] = slots[i];
		device_complete(&s->completions,
				device_received(&receiver, slot, 77));
	}
	print_completions(s);
}

static void receives(struct subject *s, bool refused)
{
	if (!s->kind->receives)
		return;
	if (s->srq)
		shared_receives(s, refused);
	else
		own_receives(s, refused);
}

/* ---- arming ---- */

static void arm(struct subject *s, int solicited_only)
{
	uint8_t *at = s->completions.object->registers + ARM_AT;
	int err;

	print_case(s, solicited_only ? "arm for solicited\n" : "arm for all\n");
	fill(REGISTER, at, 0, 8);
	err = ibv_req_notify_cq(s->cq, solicited_only);
	printf("armed %d %08x ", err,
	       be32toh(s->completions.object->records[ARMED]));
	print_hex(REGISTER, at, 0, 8);
	putchar('\n');
}

/* ---- wrong signatures ---- */

/* Between completions; the next configuration of the key says so to the device. */
static void wrong_signature(struct subject *s)
{
	struct ibv_sge sge = { DATA_AT, 200, 1 };
	struct request r = { .opcode = IBV_WR_SEND,
			     .flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED,
			     .nsges = 1, .sges = { sge } };
	bool before = number_in(&s->numbers, 0, 2);
	struct mlx5_cqe64 wrong = own_wrong_signature(&s->numbers);
	int bad;

	print_case(s, "a wrong signature\n");
	printf("posted %d\n", post_requests(s->qp, s->kind, &r, 1, &bad));
	if (before)
		device_complete(&s->completions, wrong);
	complete_sends(s, false);
	if (!before)
		device_complete(&s->completions, wrong);
	print_completions(s);
	own_print_errors();
}

/* ---- a queue pair and its corpus ---- */

static void make_addresses(struct subject *s)
{
	for (unsigned int i = 0; i < 8; i++) {
		struct numbers *n = &s->numbers;
		struct ibv_ah_attr attr = {
			.grh = { .flow_label = number_in(n, 0, 1u << 20),
				 .sgid_index = i % 2,
				 .hop_limit = number_in(n, 0, 256),
				 .traffic_class = number_in(n, 0, 256) },
			.dlid = number_in(n, 0, 1u << 16),
			.sl = number_in(n, 0, 16),
			.src_path_bits = number_in(n, 0, 128),
			.static_rate = number_in(n, 0, 19),
			.is_global = s->kind->port == MLX5_PORT_ETHERNET ||
				     i % 2,
			.port_num = s->kind->port,
		};

		for (unsigned int j = 0; j < 16; j++)
			attr.grh.dgid.raw[j] = next_number(n);
		/* The last has no flow: the source port is any. */
		if (i == 7)
			attr.grh.flow_label = 0;
		s->material.ahs[i] = ibv_create_ah(pd, &attr);
		if (!s->material.ahs[i])
			die("ibv_create_ah: %s", strerror(errno));
	}
	s->material.nahs = 8;
}

static struct ibv_pd *thread_domain(void)
{
	struct ibv_td_init_attr none = {};
	struct ibv_parent_domain_init_attr init = { .pd = pd };
	struct ibv_pd *parent;

	init.td = ibv_alloc_td(context, &none);
	if (!init.td)
		die("ibv_alloc_td: %s", strerror(errno));
	parent = ibv_alloc_parent_domain(context, &init);
	if (!parent)
		die("ibv_alloc_parent_domain: %s", strerror(errno));
	return parent;
}

static struct ibv_xrcd *xrc_domain(void)
{
	struct ibv_xrcd_init_attr init = {
		.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
		.fd = -1,
		.oflags = O_CREAT,
	};
	struct ibv_xrcd *xrcd = ibv_open_xrcd(context, &init);

	if (!xrcd)
		die("ibv_open_xrcd: %s", strerror(errno));
	return xrcd;
}

static void make_subject(struct subject *s)
{
	const struct kind *kind = s->kind;
	struct ibv_qp_init_attr_ex attr = {
		.cap = { .max_send_wr = kind->requests,
			 .max_recv_wr = kind->shared ? 0 : kind->receives,
			 .max_send_sge = kind->sges,
			 .max_recv_sge = kind->shared ? 0 : kind->recv_sges,
			 .max_inline_data = kind->inline_bytes },
		.qp_type = kind->type,
		.sq_sig_all = kind->signal_all,
		.pd = kind->thread ? thread_domain() : pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD,
	};

	s->cq = ibv_create_cq(context, 20, NULL, NULL, 0);
	if (!s->cq)
		die("ibv_create_cq: %s", strerror(errno));
	s->completions = device_cq(s->cq);
	attr.send_cq = attr.recv_cq = s->cq;
	if (kind->shared) {
		struct ibv_srq_init_attr_ex init = {
			.attr = { .max_wr = kind->receives,
				  .max_sge = kind->recv_sges },
			.comp_mask = IBV_SRQ_INIT_ATTR_PD |
				     IBV_SRQ_INIT_ATTR_TYPE,
			.srq_type = IBV_SRQT_BASIC,
			.pd = pd,
		};

		if (kind->type == IBV_QPT_XRC_SEND) {
			init.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD |
					  IBV_SRQ_INIT_ATTR_CQ;
			init.srq_type = IBV_SRQT_XRC;
			init.xrcd = xrc_domain();
			init.cq = s->cq;
			attr.recv_cq = NULL;
		}
		s->srq = ibv_create_srq_ex(context, &init);
		if (!s->srq)
			die("ibv_create_srq_ex: %s", strerror(errno));
		if (kind->type != IBV_QPT_XRC_SEND)
			attr.srq = s->srq;
		s->shared = device_srq(s->srq);
	}
	if (kind->underlay) {
		attr.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
		attr.create_flags = IBV_QP_CREATE_SOURCE_QPN;
		attr.source_qpn = 0x123456;
	}
	if (kind->extended) {
		attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
		attr.send_ops_flags = send_operations(kind);
	}
	s->qp = kind->type == IBV_QPT_DRIVER || kind->own ?
			own_queue_pair(context, kind, &attr) :
			ibv_create_qp_ex(context, &attr);
	if (!s->qp)
		die("%s: no queue pair: %s", kind->name, strerror(errno));
	s->object = device_qp(s->qp);
	device_ready(s->qp, kind->underlay ? 0 : kind->port);
	if (attr.cap.max_send_wr < kind->requests ||
	    attr.cap.max_send_sge < kind->sges ||
	    attr.cap.max_inline_data < kind->inline_bytes ||
	    (!kind->shared && (attr.cap.max_recv_wr < kind->receives ||
			       attr.cap.max_recv_sge < kind->recv_sges)))
		die("%s: a queue pair holds less than was asked for",
		    kind->name);
	print_case(s, "made\n");
	printf("sizes send %u sges %u inline %u recv %u sges %u\n",
	       attr.cap.max_send_wr, attr.cap.max_send_sge,
	       attr.cap.max_inline_data, attr.cap.max_recv_wr,
	       attr.cap.max_recv_sge);
	if (kind->type == IBV_QPT_UD || kind->type == IBV_QPT_DRIVER)
		make_addresses(s);
	s->material.region = region;
	if (kind->keys) {
		s->material.window = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
		if (!s->material.window)
			die("ibv_alloc_mw: %s", strerror(errno));
	}
}

/* Posts until so many blocks were: the index that entries have has 16 bits. */
static void post_first(struct subject *s)
{
	struct ibv_sge sge = { DATA_AT, 200, 1 };
	struct request r = { .opcode = IBV_WR_SEND, .flags = IBV_SEND_INLINE,
			     .nsges = 1, .sges = { sge } };
	struct ibv_wc wc[4];
	int bad;

	while (s->posted < s->kind->first) {
		if (post_requests(s->qp, s->kind, &r, 1, &bad))
			die("a post to get to block %u failed",
			    s->kind->first);
		complete_sends(s, false);
		if (ibv_poll_cq(s->cq, 4, wc) != 1)
			die("a completion was lost at block %u", s->posted);
	}
}

static void run(const struct kind *kind, uint64_t seed)
{
	struct subject s = { .kind = kind, .numbers = { seed } };

	make_subject(&s);
	post_first(&s);
	for (unsigned int i = 0; i < POSTS; i++) {
		random_post(&s);
		if (i % (POSTS / RECEIVES) == 0)
			receives(&s, false);
		if (i % 16 == 5)
			arm(&s, i & 16);
		if (kind->protects && i % 4 == 3)
			wrong_signature(&s);
	}
	every_length(&s);
	refused_posts(&s);
	receives(&s, true);
	receives(&s, false);
	random_post(&s);
}

/* With an argument, only the kinds whose name begins so. */
int main(int argc, char **argv)
{
	const char *only = argc > 1 ? argv[1] : "";
	uint8_t *data = mmap((void *)(uintptr_t)DATA_AT, DATA_BYTES,
			     PROT_READ | PROT_WRITE,
			     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE,
			     -1, 0);

	if (data != (uint8_t *)(uintptr_t)DATA_AT)
		die("no memory at %#llx", DATA_AT);
	/* Not what the queues are filled with. */
	for (size_t i = 0; i < DATA_BYTES; i++)
		data[i] = i * 31 + (i >> 9);
	context = device_open();
	printf("provider %s\n", device_provider(context));
	pd = ibv_alloc_pd(context);
	if (!pd)
		die("ibv_alloc_pd: %s", strerror(errno));
	region = ibv_reg_mr(pd, data, DATA_BYTES,
			    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND |
				    IBV_ACCESS_REMOTE_WRITE |
				    IBV_ACCESS_REMOTE_READ |
				    IBV_ACCESS_REMOTE_ATOMIC);
	if (!region)
		die("ibv_reg_mr: %s", strerror(errno));
	own_start(context, pd);
	for (unsigned int i = 0; i < nkinds; i++)
		if (!strncmp(kinds[i].name, only, strlen(only)))
			run(&kinds[i], 0x5eed0000 + i / 2);
	if (!strncmp("tags", only, strlen(only)))
		run_tags(context, pd);
	return 0;
}

/* SPDX-License-Identifier: MIT */
/*
 * Tag matching: what a provider writes for changes of the list of tags, into the
 * queue pair that it makes for them, and what it says of completions.
 */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "mlx5_bytes.h"

#define MOST_TAGS 6
#define MOST_OPERATIONS 8
#define RECEIVES 7
#define ROUNDS 3000

/* What the device says of a message, in the CQE. */
enum operation {
	CONSUMED = 1,
	EXPECTED = 2,
	UNEXPECTED = 3,
	NO_TAG = 4,
	APPEND = 5,
	REMOVE = 6,
	NOOP = 7,
	CONSUMED_SW_RNDV = 9,
	CONSUMED_MSG = 0xa,
	CONSUMED_MSG_SW_RNDV = 0xb,
	CANCELED = 0xc,
};

/* Signalled changes, which complete in order. */
static struct {
	enum operation operation;
	uint32_t handle;
} pending[MOST_OPERATIONS];
static unsigned int npending;
/* Tags in the list: those of which messages may be told. */
static bool in_list[MOST_TAGS + 1], being_removed[MOST_TAGS + 1];
/* The first part of a message of the tag was told. */
static bool half[MOST_TAGS + 1];
static uint32_t handled, outstanding;
static uint32_t receives;

static struct mlx5_cqe64 cqe_of(const struct subject *s, uint8_t opcode,
				enum operation operation)
{
	struct mlx5_cqe64 cqe = {
		.srqn_uidx = htobe32(s->shared->user_index),
		.app = 1,
		.app_op = operation,
		.byte_cnt = htobe32(30),
		.sop_drop_qpn = htobe32(0x777),
		.timestamp = htobe64(0x3000),
		.op_own = opcode << 4,
	};

	return cqe;
}

static void print_completions(struct subject *s)
{
	struct ibv_cq_ex *cq = (struct ibv_cq_ex *)s->cq;
	struct ibv_poll_cq_attr attr = {};
	int err = ibv_start_poll(cq, &attr);

	while (!err) {
		struct ibv_wc_tm_info info = {};

		ibv_wc_read_tm_info(cq, &info);
		printf("completion %016lx status %d flags %u", cq->wr_id,
		       cq->status, ibv_wc_read_wc_flags(cq));
		if (!cq->status)
			printf(" opcode %d bytes %u tag %lx priv %x number %u",
			       ibv_wc_read_opcode(cq),
			       ibv_wc_read_byte_len(cq), info.tag, info.priv,
			       ibv_wc_read_qp_num(cq));
		putchar('\n');
		err = ibv_next_poll(cq);
		if (err)
			ibv_end_poll(cq);
	}
	if (err != ENOENT)
		printf("completion error %d\n", err);
}

/* ---- changes ---- */

/* A tag that may be removed; none if there is none. */
static int removable(struct numbers *n)
{
	uint32_t first = number_in(n, 0, MOST_TAGS + 1);

	for (uint32_t i = 0; i <= MOST_TAGS; i++) {
		uint32_t handle = (first + i) % (MOST_TAGS + 1);

		if (in_list[handle] && !being_removed[handle] && !half[handle])
			return handle;
	}
	return -1;
}

/* Entries of tags that are in the list, or have a change that was not told. */
static unsigned int entries_used(void)
{
	unsigned int count = 0;

	for (uint32_t handle = 0; handle <= MOST_TAGS; handle++) {
		bool used = in_list[handle];

		for (unsigned int i = 0; i < npending; i++)
			used |= pending[i].operation != NOOP &&
				pending[i].handle == handle;
		count += used;
	}
	return count;
}

/* One tag more than there are entries. */
static void post_too_many(struct subject *s)
{
	struct ibv_ops_wr *bad = NULL, wr = { .opcode = IBV_WR_TAG_ADD };
	uint32_t last;
	int err;

	if (entries_used() < MOST_TAGS || outstanding == MOST_OPERATIONS)
		return;
	print_case(s, "refused: too many tags\n");
	before_post(s);
	err = ibv_post_srq_ops(s->srq, &wr, &bad);
	printf("posted %d %d 0 %08x\n", err, bad == &wr, send_record(s));
	take_sends(s, true, &last);
}

static void post(struct subject *s)
{
	static const char *const names[] = { "add", "del", "sync" };
	struct numbers *n = &s->numbers;
	struct ibv_ops_wr list[3], *bad = NULL;
	struct ibv_sge sges[3];
	unsigned int count = number_in(n, 1, 4), used = entries_used();
	uint32_t before = send_record(s), last;
	int err;

	/* All of them may have to wait. */
	if (outstanding + count > MOST_OPERATIONS)
		return;
	memset(list, 0, sizeof(list));
	for (unsigned int i = 0; i < count; i++) {
		struct ibv_ops_wr *wr = &list[i];
		int tag = removable(n);

		*wr = (struct ibv_ops_wr){
			.wr_id = next_number(n),
			.next = i + 1 < count ? &list[i + 1] : NULL,
			.opcode = number_in(n, 0, 4) % 3,
			.flags = number_in(n, 0, 4) ? IBV_OPS_SIGNALED : 0,
		};
		/* Once only, and of an older post: the list is not known
		 * before. */
		if (wr->opcode == IBV_WR_TAG_DEL && tag < 0)
			wr->opcode = IBV_WR_TAG_SYNC;
		if (wr->opcode == IBV_WR_TAG_ADD && used++ >= MOST_TAGS)
			wr->opcode = IBV_WR_TAG_SYNC;
		/* The last frees the queue of those before it. */
		if (i + 1 == count)
			wr->flags |= IBV_OPS_SIGNALED;
		switch (wr->opcode) {
		case IBV_WR_TAG_ADD:
			/* After a count was told without a tag, the stock
			 * provider still has the old one. */
			if (number_in(n, 0, 2))
				handled = number_in(n, 0, 1u << 16);
			wr->flags |= IBV_OPS_TM_SYNC;
			wr->tm.unexpected_cnt = handled;
			wr->tm.add.recv_wr_id = next_number(n);
			wr->tm.add.tag = next_number(n);
			wr->tm.add.mask = next_number(n);
			wr->tm.add.sg_list = &sges[i];
			wr->tm.add.num_sge = number_in(n, 0, 4) ? 1 : 0;
			sges[i] = (struct ibv_sge){
				DATA_AT + number_in(n, 0, 1000),
				number_in(n, 0, 5) ? number_in(n, 1, 1000) : 0,
				next_number(n),
			};
			break;
		case IBV_WR_TAG_DEL:
			wr->tm.handle = tag;
			being_removed[tag] = true;
			break;
		case IBV_WR_TAG_SYNC:
			if (number_in(n, 0, 2))
				wr->flags |= IBV_OPS_TM_SYNC;
			wr->tm.unexpected_cnt = handled;
			break;
		}
	}
	print_case(s, "post");
	for (unsigned int i = 0; i < count; i++)
		printf(" %s/%d", names[list[i].opcode], list[i].tm.add.num_sge);
	putchar('\n');
	before_post(s);
	err = ibv_post_srq_ops(s->srq, list, &bad);
	printf("posted %d %d %u %08x\n", err, err ? (int)(bad - list) : -1,
	       (send_record(s) - before) & 0xffff, send_record(s));
	take_sends(s, true, &last);
	for (struct ibv_ops_wr *wr = list; wr; wr = wr->next) {
		static const enum operation told[] = { APPEND, REMOVE, NOOP };
		uint32_t handle = wr->tm.handle;

		printf("handle %u\n", wr->opcode == IBV_WR_TAG_SYNC ? 0 : handle);
		if (wr->opcode == IBV_WR_TAG_ADD) {
			in_list[handle] = true;
			being_removed[handle] = half[handle] = false;
		}
		/* Of an unsignalled removal nothing is told. */
		if (wr->opcode == IBV_WR_TAG_DEL &&
		    !(wr->flags & IBV_OPS_SIGNALED))
			in_list[handle] = false;
		outstanding++;
		if (!(wr->flags & IBV_OPS_SIGNALED))
			continue;
		pending[npending].operation = told[wr->opcode];
		pending[npending++].handle = handle;
	}
	print_completions(s);
}

/* ---- what the device says ---- */

static void tell_changes(struct subject *s)
{
	unsigned int count = number_in(&s->numbers, 0, npending + 1);

	if (!count)
		return;
	print_case(s, "changes\n");
	for (unsigned int i = 0; i < count; i++) {
		struct mlx5_cqe64 cqe = cqe_of(s, MLX5_CQE_NO_PACKET,
					       pending[i].operation);
		uint32_t handle = pending[i].handle;
		bool removed = pending[i].operation == REMOVE;
		bool success = !removed || (in_list[handle] && !half[handle]);

		cqe.tm_cqe.success = htobe32(success ? MLX5_TMC_SUCCESS : 0);
		/* As it should be, or not. */
		cqe.tm_cqe.hw_phase_cnt = htobe16(
			number_in(&s->numbers, 0, 3) ? handled : 1);
		device_complete(&s->completions, cqe);
		if (removed && success)
			in_list[handle] = false;
	}
	npending -= count;
	memmove(pending, pending + count, npending * sizeof(pending[0]));
	/* Those before the last signalled one are done, too. */
	if (!npending)
		outstanding = 0;
	print_completions(s);
}

static void tell_tag(struct subject *s)
{
	static const enum operation whole[] = { CONSUMED_MSG,
						CONSUMED_MSG_SW_RNDV, CANCELED };
	struct numbers *n = &s->numbers;
	uint32_t handle = number_in(n, 0, MOST_TAGS + 1);
	struct mlx5_cqe64 cqe;

	if (!in_list[handle])
		return;
	print_case(s, "a message with a tag\n");
	if (half[handle]) {
		cqe = cqe_of(s, MLX5_CQE_RESP_SEND, EXPECTED);
		in_list[handle] = false;
	} else if (number_in(n, 0, 2)) {
		bool incomplete = number_in(n, 0, 2);

		cqe = cqe_of(s,
			     incomplete ? MLX5_CQE_RESP_SEND :
					  MLX5_CQE_NO_PACKET,
			     incomplete ? CONSUMED_SW_RNDV : CONSUMED);
		half[handle] = true;
	} else {
		static const uint8_t opcodes[] = { MLX5_CQE_RESP_SEND,
						   MLX5_CQE_RESP_SEND_IMM };

		cqe = cqe_of(s, opcodes[number_in(n, 0, 2)],
			     whole[number_in(n, 0, 3)]);
		in_list[handle] = false;
	}
	cqe.tmh.opcode = IBV_TMH_EAGER;
	cqe.tmh.app_ctx = htobe32(next_number(n));
	cqe.tmh.tag = htobe64(next_number(n));
	cqe.app_info = htobe16(handle);
	device_complete(&s->completions, cqe);
	print_completions(s);
}

static void tell_receive(struct subject *s)
{
	struct numbers *n = &s->numbers;
	struct mlx5_cqe64 cqe;
	uint32_t kind;

	if (!receives)
		return;
	print_case(s, "a message without one\n");
	kind = number_in(n, 0, 4);
	cqe = cqe_of(s, number_in(n, 0, 2) ? MLX5_CQE_RESP_SEND :
					     MLX5_CQE_RESP_SEND_IMM,
		     kind == 0 ? NO_TAG : UNEXPECTED);
	cqe.tmh.tag = htobe64(next_number(n));
	/* One that is not of tag matching. */
	if (kind == 1)
		cqe.app = 0;
	cqe.wqe_counter = htobe16(s->next_slot);
	s->next_slot = device_shared_next(s->shared, s->next_slot);
	receives--;
	device_complete(&s->completions, cqe);
	print_completions(s);
}

static void post_receive(struct subject *s)
{
	struct ibv_recv_wr *bad, wr = { .wr_id = next_number(&s->numbers) };

	if (receives < RECEIVES && !ibv_post_srq_recv(s->srq, &wr, &bad))
		receives++;
}

/* ---- */

void run_tags(struct ibv_context *context, struct ibv_pd *pd)
{
	static const struct kind kind = { .name = "tags" };
	struct subject s = { .kind = &kind, .numbers = { 0x5eed1000 } };
	struct ibv_cq_init_attr_ex cq = {
		.cqe = 60,
		.wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_TM_INFO,
	};
	struct ibv_srq_init_attr_ex init = {
		.attr = { .max_wr = RECEIVES, .max_sge = 1 },
		.comp_mask = IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE |
			     IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM,
		.srq_type = IBV_SRQT_TM,
		.pd = pd,
		.tm_cap = { .max_num_tags = MOST_TAGS,
			    .max_ops = MOST_OPERATIONS },
	};
	struct ibv_cq_ex *cq_ex = ibv_create_cq_ex(context, &cq);

	if (!cq_ex)
		die("ibv_create_cq_ex: %s", strerror(errno));
	s.cq = ibv_cq_ex_to_cq(cq_ex);
	s.completions = device_cq(s.cq);
	init.cq = s.cq;
	s.srq = ibv_create_srq_ex(context, &init);
	if (!s.srq)
		die("ibv_create_srq_ex of tag matching: %s", strerror(errno));
	s.shared = device_srq(s.srq);
	s.object = device_newest_qp();
	for (unsigned int i = 0; i < ROUNDS; i++) {
		post_receive(&s);
		switch (number_in(&s.numbers, 0, 5)) {
		case 0:
		case 1:
			post(&s);
			post_too_many(&s);
			break;
		case 2:
			tell_changes(&s);
			break;
		case 3:
			tell_tag(&s);
			break;
		case 4:
			tell_receive(&s);
			break;
		}
	}
	if (ibv_destroy_srq(s.srq) || ibv_destroy_cq(s.cq))
		die("the queues could not be destroyed");
}

/* SPDX-License-Identifier: MIT */
#include "mlx5_corpus.h"

#include <string.h>

#include "mlx5_own.h"
#include "mlx5_standin.h"

#define RC IBV_QPT_RC
#define UC IBV_QPT_UC
#define UD IBV_QPT_UD
#define XRC IBV_QPT_XRC_SEND
/* Initiators of dynamic connections, by ibv_wr_* only. */
#define DC IBV_QPT_DRIVER
#define RAW IBV_QPT_RAW_PACKET
#define ETH MLX5_PORT_ETHERNET
#define IB MLX5_PORT_INFINIBAND

/* The send queues are small, so that work requests of several blocks come to
 * lie over the end in many ways. */
const struct kind kinds[] = {
	/* name, type, sges, inline, requests, recv sges, receives,
	 * signal all, extended, shared, keys, port, first, thread, own,
	 * protects, underlay */
#define BOTH(name, type, sges, bytes, requests, recv_sges, receives, all,   \
	     shared, keys, port, first)                                     \
	{ name, type, sges, bytes, requests, recv_sges, receives, all,      \
	  false, shared, keys, port, first, false, false, false, false },     \
	{ name "-wr", type, sges, bytes, requests, recv_sges, receives,     \
	  all, true, shared, keys, port, first, false, false, false, false }
	BOTH("rc-1", RC, 1, 0, 12, 1, 10, false, false, false, ETH, 0),
	BOTH("rc-4", RC, 4, 64, 10, 3, 7, true, false, false, IB, 0),
	BOTH("rc-30", RC, 30, 440, 7, 16, 5, false, false, false, ETH, 0),
	BOTH("rc-turn", RC, 9, 200, 9, 2, 5, false, true, false, ETH, 65450),
	BOTH("rc-keys", RC, 2, 30, 10, 2, 5, false, false, true, ETH, 0),
	BOTH("uc-2", UC, 2, 100, 11, 2, 9, false, false, false, IB, 0),
	BOTH("uc-keys", UC, 2, 100, 11, 2, 9, true, false, true, IB, 0),
	BOTH("ud-ib", UD, 3, 128, 9, 2, 6, false, false, false, IB, 0),
	BOTH("ud-roce", UD, 5, 60, 9, 2, 6, true, true, false, ETH, 0),
	BOTH("xrc-3", XRC, 3, 90, 9, 2, 6, false, true, false, IB, 0),
	BOTH("xrc-keys", XRC, 1, 30, 10, 1, 4, false, true, true, ETH, 0),
	BOTH("packet-4", RAW, 4, 90, 9, 2, 6, false, false, false, ETH, 0),
	BOTH("packet-turn", RAW, 9, 200, 9, 2, 5, true, false, false, ETH, 65450),
	BOTH("packet-1", RAW, 1, 0, 9, 1, 5, false, false, false, ETH, 0),
	{ "underlay-4", UD, 4, 90, 9, 2, 6, false, false, false, false, IB, 0,
	  false, false, false, true },
	{ "underlay-1", UD, 1, 0, 9, 1, 5, true, false, false, false, IB, 0,
	  false, false, false, true },
	{ "dc-ib-wr", DC, 3, 90, 9, 0, 0, false, true, false, false, IB, 0,
	  false, false, false, false },
	{ "dc-roce-wr", DC, 5, 60, 9, 0, 0, true, true, false, true, ETH, 0,
	  false, false, false, false },
	{ "rc-layouts-wr", RC, 5, 250, 9, 2, 5, false, true, false, true, ETH, 0,
	  false, true, false, false },
	{ "rc-protects-wr", RC, 5, 440, 16, 2, 5, false, true, false, false, ETH,
	  0, false, true, true, false },
	{ "rc-protects-all-wr", RC, 3, 400, 16, 2, 5, true, true, false, false,
	  IB, 65450, false, true, true, false },
	{ "rc-own", RC, 3, 64, 9, 2, 6, false, false, false, false, ETH, 0,
	  true, false, false, false },
	{ "rc-own-wr", RC, 3, 64, 9, 2, 6, false, true, false, false, ETH, 0,
	  true, false, false, false },
};
const unsigned int nkinds = sizeof(kinds) / sizeof(kinds[0]);

/* splitmix64 */
uint64_t next_number(struct numbers *numbers)
{
	uint64_t z = numbers->state += 0x9e3779b97f4a7c15ull;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

uint32_t number_in(struct numbers *numbers, uint32_t from, uint32_t to)
{
	return from + next_number(numbers) % (to - from);
}

static const enum ibv_wr_opcode operations[] = {
	IBV_WR_SEND,				/* raw packets end here */
	IBV_WR_SEND_WITH_IMM,			/* UD ends here */
	IBV_WR_SEND_WITH_INV, IBV_WR_RDMA_WRITE,
	IBV_WR_RDMA_WRITE_WITH_IMM,		/* UC ends here */
	IBV_WR_RDMA_READ, IBV_WR_ATOMIC_CMP_AND_SWP,
	IBV_WR_ATOMIC_FETCH_AND_ADD,
};

/* Of queue pairs that may change keys, as often as all others together. */
static const enum ibv_wr_opcode key_operations[] = { IBV_WR_LOCAL_INV,
						     IBV_WR_BIND_MW };

static unsigned int operations_of(const struct kind *kind)
{
	enum ibv_qp_type type = kind->type;

	return kind->underlay ? 1 : type == RAW ? 1 : type == UD ? 2 : type == UC ? 5 : 8;
}

const char *opcode_name(enum ibv_wr_opcode opcode)
{
	switch (opcode) {
	case IBV_WR_SEND: return "send";
	case IBV_WR_SEND_WITH_IMM: return "send-imm";
	case IBV_WR_SEND_WITH_INV: return "send-inv";
	case IBV_WR_RDMA_WRITE: return "write";
	case IBV_WR_RDMA_WRITE_WITH_IMM: return "write-imm";
	case IBV_WR_RDMA_READ: return "read";
	case IBV_WR_ATOMIC_CMP_AND_SWP: return "compare-swap";
	case IBV_WR_ATOMIC_FETCH_AND_ADD: return "fetch-add";
	case IBV_WR_LOCAL_INV: return "local-inv";
	case IBV_WR_BIND_MW: return "bind";
	default: return own_name(opcode);
	}
}

uint64_t send_operations(const struct kind *kind)
{
	uint64_t flags = IBV_QP_EX_WITH_SEND;

	if (kind->type == RAW)
		return flags;
	flags |= IBV_QP_EX_WITH_SEND_WITH_IMM;
	if (kind->keys)
		flags |= IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW;
	if (kind->type != UD)
		flags |= IBV_QP_EX_WITH_SEND_WITH_INV |
			 IBV_QP_EX_WITH_RDMA_WRITE |
			 IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
	if (kind->type == RC || kind->type == XRC || kind->type == DC)
		flags |= IBV_QP_EX_WITH_RDMA_READ |
			 IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |
			 IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
	return flags;
}

static struct ibv_sge element(struct numbers *numbers, uint32_t length)
{
	return (struct ibv_sge){
		.addr = DATA_AT + number_in(numbers, 0, DATA_BYTES - 8192),
		.length = length,
		.lkey = next_number(numbers),
	};
}

unsigned int make_list(struct numbers *numbers, struct ibv_sge *sges,
		       unsigned int most)
{
	unsigned int count = number_in(numbers, 0, most + 1);

	for (unsigned int i = 0; i < count; i++) {
		uint32_t length = number_in(numbers, 1, 1u << 31);

		/* Now and then an element of no bytes. */
		if (number_in(numbers, 0, 8) == 0)
			length = 0;
		sges[i] = element(numbers, length);
	}
	return count;
}

/* Pieces of at most so many bytes in all, also none. */
static unsigned int make_inline(struct numbers *numbers, struct request *r,
				unsigned int most, uint32_t bytes)
{
	unsigned int count = number_in(numbers, 0, most + 1);

	for (unsigned int i = 0; i < count; i++) {
		uint32_t length = number_in(numbers, 0, bytes + 1);

		/* All that there is room for, often. */
		if (i + 1 == count && number_in(numbers, 0, 3) == 0)
			length = bytes;
		r->sges[i] = element(numbers, length);
		bytes -= length;
	}
	return count;
}

/* Ethernet's headers at least, of which the first elements may have a part. */
static void whole_frame(struct numbers *numbers, struct request *r)
{
	uint64_t bytes = 0;

	for (unsigned int i = 0; i < r->nsges; i++)
		bytes += r->sges[i].length;
	if (bytes >= LEAST_FRAME)
		return;
	if (!r->nsges)
		r->sges[r->nsges++] = element(numbers, 0);
	r->sges[r->nsges - 1].length = LEAST_FRAME;
}

/* IPoIB's header at least, all of it in the first element. */
static void whole_datagram(struct numbers *numbers, struct request *r)
{
	if (!r->nsges)
		r->sges[r->nsges++] = element(numbers, 0);
	if (r->sges[0].length < LEAST_IPOIB)
		r->sges[0].length = LEAST_IPOIB;
}

/* What a window shows; nothing takes it away from where it was. */
static struct ibv_mw_bind_info make_bind(struct numbers *numbers,
					 struct ibv_mr *region)
{
	static const unsigned int access[] = {
		IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
		IBV_ACCESS_REMOTE_ATOMIC,
	};
	struct ibv_mw_bind_info bind = { .mr = region };

	if (number_in(numbers, 0, 5) == 0)
		return bind;
	bind.addr = DATA_AT + number_in(numbers, 0, DATA_BYTES / 2);
	bind.length = number_in(numbers, 1, DATA_BYTES / 2);
	for (unsigned int i = 0; i < 3; i++)
		if (number_in(numbers, 0, 2))
			bind.mw_access_flags |= access[i];
	return bind;
}

struct request make_request(struct numbers *numbers, const struct kind *kind,
			    const struct material *m)
{
	struct request r = {
		.wr_id = next_number(numbers),
		.opcode = operations[number_in(numbers, 0,
					       operations_of(kind))],
		.immediate = next_number(numbers),
		.key = next_number(numbers),
		.remote_address = next_number(numbers),
		.compare_add = next_number(numbers),
		.swap = next_number(numbers),
		.ah = m->nahs ? m->ahs[number_in(numbers, 0, m->nahs)] : NULL,
		.remote_qpn = next_number(numbers) & 0xffffff,
		.remote_qkey = next_number(numbers),
		.remote_srqn = next_number(numbers) & 0xffffff,
	};
	uint32_t bits;

	if (kind->type == DC)
		r.access_key = next_number(numbers);
	bits = next_number(numbers);
	if (kind->keys && number_in(numbers, 0, 2)) {
		r.opcode = key_operations[number_in(numbers, 0, 2)];
		r.window = m->window;
		r.bind = make_bind(numbers, m->region);
	}
	if (kind->own && number_in(numbers, 0, 2))
		r.opcode = number_in(numbers, OWN_LIST, OWN_END);
	if (kind->protects && number_in(numbers, 0, 3))
		r.opcode = (enum ibv_wr_opcode)OWN_PROTECT;
	if (bits & 1)
		r.flags |= IBV_SEND_SIGNALED;
	if (bits & 2)
		r.flags |= IBV_SEND_SOLICITED;
	if (bits & 4)
		r.flags |= IBV_SEND_FENCE;
	if (bits & 16 && (kind->type == RAW || kind->underlay))
		r.flags |= IBV_SEND_IP_CSUM;
	switch ((unsigned int)r.opcode) {
	case OWN_LIST:
	case OWN_INTERLEAVED:
	case OWN_CONFIGURE:
	case OWN_PROTECT:
	case OWN_RAW:
		/* As many as fit, with the head of an interleaved layout. */
		r.nsges = make_list(numbers, r.sges, 15);
		break;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
		r.nsges = 1;
		/* Eight bytes are what ibv_post_send makes of any length. */
		r.sges[0] = element(numbers, kind->extended ? 8 : 8 + bits % 64);
		break;
	case IBV_WR_LOCAL_INV:
	case IBV_WR_BIND_MW:
		break;
	case IBV_WR_RDMA_READ:
		r.nsges = make_list(numbers, r.sges, kind->sges);
		break;
	default:
		if (bits & 8 && kind->inline_bytes) {
			r.flags |= IBV_SEND_INLINE;
			r.nsges = make_inline(numbers, &r, kind->sges,
					      kind->inline_bytes);
		} else {
			r.nsges = make_list(numbers, r.sges, kind->sges);
		}
	}
	if (kind->type == RAW)
		whole_frame(numbers, &r);
	if (kind->underlay)
		whole_datagram(numbers, &r);
	return r;
}

/* ---- posting ---- */

static int post_list(struct ibv_qp *qp, struct request *requests,
		     unsigned int count, int *bad)
{
	struct ibv_send_wr list[MOST_REQUESTS], *refused = NULL;
	int err;

	for (unsigned int i = 0; i < count; i++) {
		struct request *r = &requests[i];
		struct ibv_send_wr *wr = &list[i];

		/* Members of a union that an operation does not have are not
		 * zero, as with an application that does not clear them. */
		memset(wr, 0xee, sizeof(*wr));
		wr->wr_id = r->wr_id;
		wr->next = i + 1 < count ? &list[i + 1] : NULL;
		wr->sg_list = r->sges;
		wr->num_sge = r->nsges;
		wr->opcode = r->opcode;
		wr->send_flags = r->flags;
		switch (r->opcode) {
		case IBV_WR_SEND_WITH_INV:
		case IBV_WR_LOCAL_INV:
			wr->invalidate_rkey = r->key;
			break;
		case IBV_WR_BIND_MW:
			wr->imm_data = 0;
			wr->bind_mw.mw = r->window;
			wr->bind_mw.rkey = r->key;
			wr->bind_mw.bind_info = r->bind;
			break;
		case IBV_WR_ATOMIC_CMP_AND_SWP:
		case IBV_WR_ATOMIC_FETCH_AND_ADD:
			wr->wr.atomic.remote_addr = r->remote_address;
			wr->wr.atomic.compare_add = r->compare_add;
			wr->wr.atomic.swap = r->swap;
			wr->wr.atomic.rkey = r->key;
			break;
		default:
			wr->imm_data = r->immediate;
			wr->wr.rdma.remote_addr = r->remote_address;
			wr->wr.rdma.rkey = r->key;
		}
		if (qp->qp_type == XRC)
			wr->qp_type.xrc.remote_srqn = r->remote_srqn;
		if (qp->qp_type == IBV_QPT_UD) {
			wr->wr.ud.ah = r->ah;
			wr->wr.ud.remote_qpn = r->remote_qpn;
			wr->wr.ud.remote_qkey = r->remote_qkey;
		}
	}
	err = ibv_post_send(qp, list, &refused);
	*bad = err && refused ? (int)(refused - list) : -1;
	return err;
}

static void operation(struct ibv_qp_ex *qp, const struct request *r)
{
	switch (r->opcode) {
	case IBV_WR_SEND:
		ibv_wr_send(qp);
		break;
	case IBV_WR_SEND_WITH_IMM:
		ibv_wr_send_imm(qp, r->immediate);
		break;
	case IBV_WR_SEND_WITH_INV:
		ibv_wr_send_inv(qp, r->key);
		break;
	case IBV_WR_RDMA_WRITE:
		ibv_wr_rdma_write(qp, r->key, r->remote_address);
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		ibv_wr_rdma_write_imm(qp, r->key, r->remote_address,
				      r->immediate);
		break;
	case IBV_WR_LOCAL_INV:
		ibv_wr_local_inv(qp, r->key);
		break;
	case IBV_WR_BIND_MW:
		ibv_wr_bind_mw(qp, r->window, r->key, &r->bind);
		break;
	case IBV_WR_RDMA_READ:
		ibv_wr_rdma_read(qp, r->key, r->remote_address);
		break;
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		ibv_wr_atomic_cmp_swp(qp, r->key, r->remote_address,
				      r->compare_add, r->swap);
		break;
	default:
		ibv_wr_atomic_fetch_add(qp, r->key, r->remote_address,
					r->compare_add);
	}
}

static void data(struct ibv_qp_ex *qp, const struct request *r)
{
	struct ibv_data_buf pieces[MOST_SGES];

	if (!(r->flags & IBV_SEND_INLINE)) {
		/* By either setter, where both can say it. */
		if (r->nsges == 1 && (r->wr_id & 1))
			ibv_wr_set_sge(qp, r->sges[0].lkey, r->sges[0].addr,
				       r->sges[0].length);
		else
			ibv_wr_set_sge_list(qp, r->nsges, r->sges);
		return;
	}
	for (unsigned int i = 0; i < r->nsges; i++)
		pieces[i] = (struct ibv_data_buf){
			.addr = (void *)(uintptr_t)r->sges[i].addr,
			.length = r->sges[i].length,
		};
	if (r->nsges == 1 && (r->wr_id & 1))
		ibv_wr_set_inline_data(qp, pieces[0].addr, pieces[0].length);
	else
		ibv_wr_set_inline_data_list(qp, r->nsges, pieces);
}

/* Where it goes, of those that go anywhere. */
static void address(struct ibv_qp_ex *qp, const struct request *r)
{
	bool has_address = r->opcode != IBV_WR_LOCAL_INV && r->opcode != IBV_WR_BIND_MW;

	if (qp->qp_base.qp_type == UD)
		ibv_wr_set_ud_addr(qp, r->ah, r->remote_qpn, r->remote_qkey);
	if (qp->qp_base.qp_type == DC && has_address)
		own_address(qp, r);
	if (qp->qp_base.qp_type == XRC && has_address)
		ibv_wr_set_xrc_srqn(qp, r->remote_srqn);
}

static int post_extended(struct ibv_qp_ex *qp, struct request *requests,
			 unsigned int count)
{
	ibv_wr_start(qp);
	for (unsigned int i = 0; i < count; i++) {
		struct request *r = &requests[i];

		qp->wr_id = r->wr_id;
		qp->wr_flags = r->flags & ~IBV_SEND_INLINE;
		if ((unsigned int)r->opcode >= OWN_LIST) {
			own_operation(qp, r);
			continue;
		}
		operation(qp, r);
		/* The address and the data in either order. */
		if (r->wr_id & 2)
			address(qp, r);
		if (r->opcode != IBV_WR_LOCAL_INV &&
		    r->opcode != IBV_WR_BIND_MW)
			data(qp, r);
		if (!(r->wr_id & 2))
			address(qp, r);
	}
	return ibv_wr_complete(qp);
}

int post_requests(struct ibv_qp *qp, const struct kind *kind,
		  struct request *requests, unsigned int count, int *bad)
{
	if (!kind->extended)
		return post_list(qp, requests, count, bad);
	*bad = -1;
	return post_extended(ibv_qp_to_qp_ex(qp), requests, count);
}

/* SPDX-License-Identifier: MIT */
/*
 * The measured calls of what mlx5dv adds to ibv_wr_*: sends of dynamic connections,
 * configurations of memory keys.
 */
#include "mlx5_rows.h"

#include <endian.h>
#include <errno.h>
#include <string.h>

#define TARGET 0x123456
#define ACCESS_KEY 0x0102030405060708ull
#define RIGHTS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ)
#define REPEAT 8
#define GAP 64

/* Control, update and context: before the elements of a key's layout. */
#define KEY_HEAD 8

/* ---- set up ---- */

static struct pair make_dv_pair(struct bench *b, struct queues *q,
				enum ibv_qp_type type,
				struct mlx5dv_qp_init_attr *own,
				uint32_t inline_bytes, uint32_t blocks)
{
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = q->cq,
		.recv_cq = q->cq,
		.cap = { .max_send_wr = SQ_ENTRIES, .max_send_sge = 1,
			 .max_inline_data = inline_bytes },
		.qp_type = type,
		.pd = q->domain,
		.comp_mask = IBV_QP_INIT_ATTR_PD |
			     IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	__typeof__(&mlx5dv_create_qp) create =
		(__typeof__(create))(uintptr_t)device_function(
			b->context, "mlx5dv_create_qp");
	__typeof__(&mlx5dv_qp_ex_from_ibv_qp_ex) functions =
		(__typeof__(functions))(uintptr_t)device_function(
			b->context, "mlx5dv_qp_ex_from_ibv_qp_ex");
	struct ibv_qp *qp = create(b->context, &attr, own);

	if (!qp)
		die("mlx5dv_create_qp: %s", strerror(errno));
	device_ready(qp, MLX5_PORT_ETHERNET);
	return (struct pair){ .qp = qp, .object = device_qp(qp),
			      .completions = &q->device, .cq = q->cq,
			      .receives = device_qp(qp),
			      .functions = functions(ibv_qp_to_qp_ex(qp)),
			      .blocks = blocks };
}

void make_dv_pairs(struct bench *b, struct queues *q)
{
	struct mlx5dv_qp_init_attr dynamic = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC,
		.dc_init_attr = { .dc_type = MLX5DV_DCTYPE_DCI },
	};
	struct mlx5dv_qp_init_attr keys = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS,
		.send_ops_flags = MLX5DV_QP_EX_WITH_MR_LIST |
				  MLX5DV_QP_EX_WITH_MR_INTERLEAVED |
				  MLX5DV_QP_EX_WITH_MKEY_CONFIGURE,
	};
	struct mlx5dv_mkey_init_attr key = {
		.pd = b->pd,
		.create_flags = MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT,
		.max_entries = KEY_ELEMENTS,
	};
	struct ibv_ah_attr ah = { .is_global = 1,
				  .grh = { .sgid_index = MLX5_GID_ROCE_V2,
					   .dgid.raw = { 0xfe, 0x80 },
					   .hop_limit = 1 },
				  .port_num = MLX5_PORT_ETHERNET };
	__typeof__(&mlx5dv_create_mkey) create =
		(__typeof__(create))(uintptr_t)device_function(
			b->context, "mlx5dv_create_mkey");

	b->ah = ibv_create_ah(b->pd, &ah);
	b->key = create(&key);
	if (!b->ah || !b->key)
		die("no address handle or memory key: %s", strerror(errno));
	for (unsigned int i = 0; i < KEY_ELEMENTS - 1; i++)
		b->parts[i] = (struct mlx5dv_mr_interleaved){
			.addr = (uintptr_t)b->buffer,
			.bytes_count = INLINE_LENGTH,
			.bytes_skip = GAP, .lkey = b->mr->lkey,
		};
	q->dynamic = make_dv_pair(b, q, IBV_QPT_DRIVER, &dynamic, 0, 2);
	q->keys = make_dv_pair(b, q, IBV_QPT_RC, &keys,
			       KEY_ELEMENTS * sizeof(struct mlx5_wqe_data_seg),
			       3);
}

/* ---- the calls ---- */

typedef void (*post_fn)(struct bench *b, struct pair *p, struct ibv_qp_ex *qp);

static inline void post(struct bench *b, struct pair *p, unsigned int calls,
			unsigned int batch, post_fn one)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(p->qp);

	for (unsigned int i = 0; i < calls; i++) {
		ibv_wr_start(qp);
		for (unsigned int j = 0; j < batch; j++) {
			qp->wr_id = j;
			one(b, p, qp);
		}
		if (ibv_wr_complete(qp))
			b->sink++;
	}
}

static inline void send(struct bench *b, struct pair *p, struct ibv_qp_ex *qp)
{
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp);
	mlx5dv_wr_set_dc_addr(p->functions, b->ah, TARGET, ACCESS_KEY);
	ibv_wr_set_sge(qp, b->mr->lkey, (uintptr_t)b->buffer, INLINE_LENGTH);
}

static inline void configure(struct bench *b, struct pair *p,
			     struct ibv_qp_ex *qp)
{
	struct mlx5dv_mkey_conf_attr none = {};

	qp->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
	mlx5dv_wr_mkey_configure(p->functions, b->key, 2, &none);
	mlx5dv_wr_set_mkey_access_flags(p->functions, RIGHTS);
	mlx5dv_wr_set_mkey_layout_list(p->functions, KEY_ELEMENTS, b->sge);
}

static inline void list(struct bench *b, struct pair *p, struct ibv_qp_ex *qp)
{
	qp->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
	mlx5dv_wr_mr_list(p->functions, b->key, RIGHTS, KEY_ELEMENTS, b->sge);
}

static inline void interleaved(struct bench *b, struct pair *p,
			       struct ibv_qp_ex *qp)
{
	qp->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
	mlx5dv_wr_mr_interleaved(p->functions, b->key, RIGHTS, REPEAT,
				 KEY_ELEMENTS - 1, b->parts);
}

#define RUN(name, pair, batch, one)                       \
	DV_RUN(name)                                      \
	{                                                 \
		post(b, &q->pair, calls, batch, one);     \
	}
RUN(run_dynamic, dynamic, 1, send)
RUN(run_dynamic_batch, dynamic, BATCH, send)
RUN(run_dynamic_large, dynamic, LARGE_BATCH, send)
RUN(run_key_configure, keys, 1, configure)
RUN(run_key_configure_batch, keys, BATCH, configure)
RUN(run_key_list, keys, 1, list)
RUN(run_key_list_batch, keys, BATCH, list)
RUN(run_key_interleaved, keys, 1, interleaved)
RUN(run_key_interleaved_batch, keys, BATCH, interleaved)

/* ---- what the device reads ---- */

/* Whether a work request has that opcode and so many segments, and is signalled. */
static bool is_of(const struct pair *p, uint32_t at, uint8_t opcode,
		  uint32_t segments)
{
	const struct mlx5_wqe_ctrl_seg *control =
		(const void *)device_send_block(p->object, at);

	return be32toh(control->opmod_idx_opcode) ==
		       ((at & 0xffff) << 8 | opcode) &&
	       be32toh(control->qpn_ds) == (p->qp->qp_num << 8 | segments) &&
	       control->fm_ce_se & MLX5_WQE_CTRL_CQ_UPDATE;
}

/* Whether an element's length is as it is in a list, or in turns. */
static bool is_element(const struct bench *b, const uint8_t *block,
		       uint32_t length)
{
	const struct mlx5_wqe_data_seg *data = (const void *)block;

	return be32toh(data->byte_count) == length &&
	       be32toh(data->lkey) == b->mr->lkey &&
	       be64toh(data->addr) == (uintptr_t)b->buffer;
}

const char *check_dynamic(struct bench *b, struct queues *q,
			  const struct row *row)
{
	const struct pair *p = &q->dynamic;

	row->run(b, q, 1);
	if (posted(p->object, MLX5_SND_DBR, p->sent) != row->batch * p->blocks)
		return "the sends left another doorbell record";
	for (unsigned int i = 0; i < row->batch; i++) {
		uint32_t at = p->sent + i * p->blocks;
		const struct mlx5_wqe_av *address =
			(const void *)(device_send_block(p->object, at) + 16);

		if (!is_of(p, at, MLX5_OPCODE_SEND, 5) ||
		    (be32toh(address->dqp_dct) & 0xffffff) != TARGET ||
		    be64toh(address->key.dc_key) != ACCESS_KEY ||
		    !is_element(b, device_send_block(p->object, at + 1),
				INLINE_LENGTH))
			return "a send of a dynamic connection has another entry";
	}
	return NULL;
}

const char *check_key(struct bench *b, struct queues *q, const struct row *row)
{
	const struct pair *p = &q->keys;
	bool turns = strstr(row->name, "interleaved") != NULL;

	row->run(b, q, 1);
	if (posted(p->object, MLX5_SND_DBR, p->sent) != row->batch * p->blocks)
		return "the configurations left another doorbell record";
	for (unsigned int i = 0; i < row->batch; i++) {
		uint32_t at = p->sent + i * p->blocks;
		const struct mlx5_wqe_mkey_context_seg *key =
			(const void *)device_send_block(p->object, at + 1);
		const uint8_t *layout = device_send_block(p->object, at + 2);
		uint64_t bytes = turns ? INLINE_LENGTH * (KEY_ELEMENTS - 1) *
						 REPEAT :
					 INLINE_LENGTH * KEY_ELEMENTS;
		uint32_t length = turns ? (INLINE_LENGTH + GAP) << 16 |
						  INLINE_LENGTH :
					  INLINE_LENGTH;

		if (!is_of(p, at, MLX5_OPCODE_UMR, KEY_HEAD + KEY_ELEMENTS) ||
		    be64toh(key->len) != bytes)
			return "a configured key has another context";
		for (unsigned int j = turns; j < KEY_ELEMENTS; j++)
			if (!is_element(b, layout + j * 16, length))
				return "a configured key has another layout";
	}
	return NULL;
}

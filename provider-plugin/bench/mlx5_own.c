/* SPDX-License-Identifier: MIT */
#include "mlx5_own.h"

#include <endian.h>
#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <string.h>

#include "mlx5_device.h"

static struct ibv_qp *(*create_qp)(struct ibv_context *, struct ibv_qp_init_attr_ex *,
				   struct mlx5dv_qp_init_attr *);
static struct mlx5dv_qp_ex *(*extended_part)(struct ibv_qp_ex *);
static struct mlx5dv_mkey *key;

void own_start(struct ibv_context *context, struct ibv_pd *pd)
{
	struct mlx5dv_mkey_init_attr attr = {
		.pd = pd,
		.create_flags = MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT,
		.max_entries = 64,
	};
	struct mlx5dv_mkey *(*create)(struct mlx5dv_mkey_init_attr *);

	create_qp = (__typeof__(create_qp))(uintptr_t)device_function(
		context, "mlx5dv_create_qp");
	extended_part = (__typeof__(extended_part))(uintptr_t)device_function(
		context, "mlx5dv_qp_ex_from_ibv_qp_ex");
	create = (__typeof__(create))(uintptr_t)device_function(context,
								"mlx5dv_create_mkey");
	key = create(&attr);
	if (!key)
		die("mlx5dv_create_mkey: %s", strerror(errno));
}

struct ibv_qp *own_queue_pair(struct ibv_context *context, const struct kind *kind,
			      struct ibv_qp_init_attr_ex *attr)
{
	struct mlx5dv_qp_init_attr own = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC,
		.dc_init_attr = { .dc_type = MLX5DV_DCTYPE_DCI },
	};

	if (kind->own) {
		own.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS;
		own.send_ops_flags = MLX5DV_QP_EX_WITH_MR_LIST |
				     MLX5DV_QP_EX_WITH_MR_INTERLEAVED |
				     MLX5DV_QP_EX_WITH_MKEY_CONFIGURE |
				     MLX5DV_QP_EX_WITH_RAW_WQE;
	}
	return create_qp(context, attr, &own);
}

void own_address(struct ibv_qp_ex *qp, const struct request *r)
{
	struct mlx5dv_qp_ex *own = extended_part(qp);

	/* Also in a stream, now and then. */
	if (r->wr_id & 12)
		mlx5dv_wr_set_dc_addr(own, r->ah, r->remote_qpn, r->access_key);
	else
		mlx5dv_wr_set_dc_addr_stream(own, r->ah, r->remote_qpn,
					     r->access_key, r->wr_id >> 48);
}

/* A WQE of up to two blocks: the flags, and the rest any. */
static void raw(struct ibv_qp_ex *qp, const struct request *r)
{
	static const uint8_t opcodes[] = { MLX5_OPCODE_SEND, MLX5_OPCODE_RDMA_WRITE,
					   MLX5_OPCODE_NOP };
	struct numbers numbers = { r->swap };
	uint64_t wqe[16];
	uint8_t segments = 1 + number_in(&numbers, 0, 8);
	struct mlx5_wqe_ctrl_seg *control = (void *)wqe;

	for (unsigned int i = 0; i < 16; i++)
		wqe[i] = next_number(&numbers);
	mlx5dv_set_ctrl_seg(control, 0, opcodes[r->swap % 3], 0, qp->qp_base.qp_num,
			    MLX5_WQE_CTRL_CQ_UPDATE, segments, r->swap >> 8,
			    r->immediate);
	mlx5dv_wr_raw_wqe(extended_part(qp), wqe);
}

void own_operation(struct ibv_qp_ex *qp, const struct request *r)
{
	struct mlx5dv_mr_interleaved parts[MOST_SGES];
	struct mlx5dv_qp_ex *own = extended_part(qp);
	struct mlx5dv_mkey_conf_attr none = {};
	uint32_t access = r->compare_add & 0xf, repeat = 1 + (r->swap & 0xffff);
	struct ibv_sge sges[MOST_SGES];

	/* Of a key; the other operations have their own data. */
	qp->wr_flags |= IBV_SEND_INLINE;
	/* A turn has 16 bits; libmlx5 counts the bytes of a list in an int. */
	for (unsigned int i = 0; i < r->nsges; i++) {
		sges[i] = r->sges[i];
		sges[i].length &= (1u << 27) - 1;
		parts[i] = (struct mlx5dv_mr_interleaved){
			.addr = r->sges[i].addr,
			.bytes_count = 1 + r->sges[i].length % 30000,
			.bytes_skip = r->swap % 30000,
			.lkey = r->sges[i].lkey,
		};
	}
	switch ((unsigned int)r->opcode) {
	case OWN_LIST:
		mlx5dv_wr_mr_list(own, key, access, r->nsges, sges);
		break;
	case OWN_INTERLEAVED:
		mlx5dv_wr_mr_interleaved(own, key, access, repeat, r->nsges, parts);
		break;
	case OWN_CONFIGURE:
		/* The rights, or the layout, or both in either order. */
		mlx5dv_wr_mkey_configure(own, key, r->swap % 3 == 2 ? 2 : 1, &none);
		if (r->swap % 3 != 1 && r->swap & 64)
			mlx5dv_wr_set_mkey_access_flags(own, access);
		if (r->swap % 3 && r->swap & 128)
			mlx5dv_wr_set_mkey_layout_list(own, r->nsges, sges);
		else if (r->swap % 3)
			mlx5dv_wr_set_mkey_layout_interleaved(own, repeat, r->nsges,
							      parts);
		if (r->swap % 3 != 1 && !(r->swap & 64))
			mlx5dv_wr_set_mkey_access_flags(own, access);
		break;
	default:
		raw(qp, r);
	}
}

const char *own_name(unsigned int operation)
{
	switch (operation) {
	case OWN_LIST: return "key-list";
	case OWN_INTERLEAVED: return "key-interleaved";
	case OWN_CONFIGURE: return "key-configure";
	default: return "raw";
	}
}

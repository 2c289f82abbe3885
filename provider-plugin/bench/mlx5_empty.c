/* SPDX-License-Identifier: MIT */
/*
 * The functions of a provider that does nothing: each returns at once. What a row
 * takes with them is the program's own loop and its calls, below which no provider
 * can be. Included by mlx5_standin.c: in a library, as a provider's are.
 */
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

static int poll_cq(struct ibv_cq *cq, int entries, struct ibv_wc *wc)
{
	(void)cq;
	(void)wc;
	return entries;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr,
		     struct ibv_send_wr **bad)
{
	(void)qp;
	(void)wr;
	(void)bad;
	return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr,
		     struct ibv_recv_wr **bad)
{
	(void)qp;
	(void)wr;
	(void)bad;
	return 0;
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr,
			 struct ibv_recv_wr **bad)
{
	(void)srq;
	(void)wr;
	(void)bad;
	return 0;
}

static int start_poll(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr)
{
	(void)cq;
	(void)attr;
	return 0;
}

static int next_poll(struct ibv_cq_ex *cq)
{
	(void)cq;
	return 0;
}

static void end_poll(struct ibv_cq_ex *cq)
{
	(void)cq;
}

static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *cq)
{
	(void)cq;
	return IBV_WC_SEND;
}

static uint32_t read_number(struct ibv_cq_ex *cq)
{
	(void)cq;
	return 0;
}

static __be32 read_immediate(struct ibv_cq_ex *cq)
{
	(void)cq;
	return 0;
}

static unsigned int read_flags(struct ibv_cq_ex *cq)
{
	(void)cq;
	return 0;
}

static void wr(struct ibv_qp_ex *qp)
{
	(void)qp;
}

static int wr_complete(struct ibv_qp_ex *qp)
{
	(void)qp;
	return 0;
}

static void wr_sge(struct ibv_qp_ex *qp, uint32_t lkey, uint64_t addr,
		   uint32_t length)
{
	(void)qp;
	(void)lkey;
	(void)addr;
	(void)length;
}

static void wr_inline(struct ibv_qp_ex *qp, void *addr, size_t length)
{
	(void)qp;
	(void)addr;
	(void)length;
}

static void wr_dc_addr(struct mlx5dv_qp_ex *qp, struct ibv_ah *ah, uint32_t dctn,
		       uint64_t key)
{
	(void)qp;
	(void)ah;
	(void)dctn;
	(void)key;
}

static void wr_key(struct mlx5dv_qp_ex *qp, struct mlx5dv_mkey *key,
		   uint8_t setters, struct mlx5dv_mkey_conf_attr *attr)
{
	(void)qp;
	(void)key;
	(void)setters;
	(void)attr;
}

static void wr_key_access(struct mlx5dv_qp_ex *qp, uint32_t access)
{
	(void)qp;
	(void)access;
}

static void wr_key_layout(struct mlx5dv_qp_ex *qp, uint16_t count,
			  const struct ibv_sge *list)
{
	(void)qp;
	(void)count;
	(void)list;
}

static void wr_key_list(struct mlx5dv_qp_ex *qp, struct mlx5dv_mkey *key,
			uint32_t access, uint16_t count, struct ibv_sge *list)
{
	(void)qp;
	(void)key;
	(void)access;
	(void)count;
	(void)list;
}

static void wr_key_interleaved(struct mlx5dv_qp_ex *qp, struct mlx5dv_mkey *key,
			       uint32_t access, uint32_t repeat, uint16_t count,
			       struct mlx5dv_mr_interleaved *parts)
{
	(void)qp;
	(void)key;
	(void)access;
	(void)repeat;
	(void)count;
	(void)parts;
}

EXPORT void mlx5_empty(struct ibv_context *context, struct ibv_cq_ex *cq,
		       struct ibv_qp_ex *qp, struct mlx5dv_qp_ex *functions)
{
	context->ops.poll_cq = poll_cq;
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	context->ops.post_srq_recv = post_srq_recv;
	cq->start_poll = start_poll;
	cq->next_poll = next_poll;
	cq->end_poll = end_poll;
	cq->read_opcode = read_opcode;
	cq->read_byte_len = read_number;
	cq->read_imm_data = read_immediate;
	cq->read_qp_num = read_number;
	cq->read_wc_flags = read_flags;
	qp->wr_start = wr;
	qp->wr_send = wr;
	qp->wr_set_sge = wr_sge;
	qp->wr_set_inline_data = wr_inline;
	qp->wr_complete = wr_complete;
	functions->wr_set_dc_addr = wr_dc_addr;
	functions->wr_mkey_configure = wr_key;
	functions->wr_set_mkey_access_flags = wr_key_access;
	functions->wr_set_mkey_layout_list = wr_key_layout;
	functions->wr_mr_list = wr_key_list;
	functions->wr_mr_interleaved = wr_key_interleaved;
}

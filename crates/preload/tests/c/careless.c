/*
 * A careless program: it has the device answer over the request, gives memory that it does
 * not have, frees pages that others use, ends a batch in the middle of a key's change, and
 * sets what belongs to none.
 * Exit status 0 if each was done or refused.
 */
#include <endian.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdlib.h>

#include "check.h"
#include "loopback.h"

#define QUERY_HCA_CAP 0x100
#define ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ)

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_qp_ex *qp;
static struct mlx5dv_qp_ex *functions;

static void answers(void)
{
	uint32_t in[4] = { htobe32(QUERY_HCA_CAP << 16), htobe32(1) };
	static uint32_t both[1024], out[1024];

	CHECK(!mlx5dv_devx_general_cmd(context, in, sizeof(in), out, sizeof(out)));
	memcpy(both, in, sizeof(in));
	CHECK(!mlx5dv_devx_general_cmd(context, both, sizeof(in), both, sizeof(both)));
	CHECK(!memcmp(both, out, sizeof(out)));
	CHECK(mlx5dv_devx_general_cmd(context, in, sizeof(in), (void *)8, 64));
}

static struct mlx5dv_mkey *create_key(int signature)
{
	struct mlx5dv_mkey_init_attr attr = {
		.pd = pd,
		.create_flags = MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT |
			(signature ? MLX5DV_MKEY_INIT_ATTR_FLAGS_BLOCK_SIGNATURE : 0),
		.max_entries = 4,
	};
	struct mlx5dv_mkey *key = mlx5dv_create_mkey(&attr);

	CHECK(key);
	return key;
}

/* Overwrites memory that was freed. */
static void reuse_memory(void)
{
	static void *blocks[8];

	for (size_t size = 16; size <= 4096; size += 16) {
		for (int i = 0; i < 8; i++) {
			blocks[i] = malloc(size);
			CHECK(blocks[i]);
			memset(blocks[i], 0x5a, size);
		}
		for (int i = 0; i < 8; i++)
			free(blocks[i]);
	}
}

/* Opens a change of a key, and sets one of its two parts. */
static void begin(struct mlx5dv_mkey *key)
{
	struct mlx5dv_mkey_conf_attr none = {};

	ibv_wr_start(qp);
	qp->wr_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
	mlx5dv_wr_mkey_configure(functions, key, 2, &none);
	mlx5dv_wr_set_mkey_access_flags(functions, ACCESS);
}

static void changes(struct ibv_mr *mr, struct ibv_cq *cq)
{
	struct ibv_sge sge = { (uintptr_t)mr->addr, 64, mr->lkey };
	struct mlx5dv_sig_block_attr signature = {
		.check_mask = MLX5DV_SIG_MASK_T10DIF_GUARD,
	};
	struct mlx5dv_mkey *key = create_key(0), *other = create_key(1);
	struct ibv_wc wc;

	/* What was aborted is not completed by a later batch. */
	begin(key);
	ibv_wr_abort(qp);
	ibv_wr_start(qp);
	mlx5dv_wr_set_mkey_layout_list(functions, 1, &sge);
	CHECK(ibv_wr_complete(qp) == EINVAL);
	/* The key of what was aborted is gone. */
	begin(other);
	ibv_wr_abort(qp);
	CHECK(!mlx5dv_destroy_mkey(other));
	reuse_memory();
	ibv_wr_start(qp);
	mlx5dv_wr_set_mkey_sig_block(functions, &signature);
	CHECK(ibv_wr_complete(qp) == EINVAL);
	/* The queue goes on. */
	begin(key);
	mlx5dv_wr_set_mkey_layout_list(functions, 1, &sge);
	CHECK(!ibv_wr_complete(qp));
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS);
	CHECK(!mlx5dv_destroy_mkey(key));
}

/* The page of type NC is one, and stays until the end; others are each another one. */
static void pages(void)
{
	struct mlx5dv_devx_uar *own = mlx5dv_devx_alloc_uar(context, MLX5DV_UAR_ALLOC_TYPE_BF);
	struct mlx5dv_devx_uar *shared = NULL, *page;

	for (int i = 0; i < 1000; i++) {
		page = mlx5dv_devx_alloc_uar(context, MLX5DV_UAR_ALLOC_TYPE_NC);
		CHECK(page && page != own && (!shared || page == shared));
		shared = page;
		if (i % 2)
			mlx5dv_devx_free_uar(page);
	}
	CHECK(own && own->page_id != shared->page_id);
	mlx5dv_devx_free_uar(own);
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct mlx5dv_context_attr devx = { .flags = MLX5DV_CONTEXT_FLAGS_DEVX };
	struct ibv_qp_init_attr_ex init = {
		.cap = { .max_send_wr = 16, .max_recv_wr = 1, .max_send_sge = 1,
			 .max_recv_sge = 1, .max_inline_data = 512 },
		.qp_type = IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	struct mlx5dv_qp_init_attr dv = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS,
		.send_ops_flags = MLX5DV_QP_EX_WITH_MKEY_CONFIGURE,
	};
	struct ibv_qp_attr attr = { .timeout = 14, .retry_cnt = 7, .rnr_retry = 7 };
	static char memory[4096] __attribute__((aligned(4096)));
	struct ibv_mr *mr;
	struct ibv_cq *cq;
	struct ibv_qp *base;

	CHECK(list && list[0]);
	context = mlx5dv_open_device(list[0], &devx);
	CHECK(context);
	pd = ibv_alloc_pd(context);
	mr = pd ? ibv_reg_mr(pd, memory, sizeof(memory), ACCESS) : NULL;
	cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	CHECK(mr && cq);
	init.pd = pd;
	init.send_cq = init.recv_cq = cq;
	base = mlx5dv_create_qp(context, &init, &dv);
	CHECK(base);
	qp = ibv_qp_to_qp_ex(base);
	functions = mlx5dv_qp_ex_from_ibv_qp_ex(qp);
	CHECK(functions);
	connect_to_itself(base, attr);
	answers();
	pages();
	changes(mr, cq);
	CHECK(!ibv_destroy_qp(base) && !ibv_destroy_cq(cq) && !ibv_dereg_mr(mr));
	CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context));
	puts("well");
	return 0;
}

/*
 * Ports of a bond (LAG) of queue pairs, as UCX and Open MPI choose them. Exit status 0
 * if all was as it should be.
 */
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdint.h>

#include "check.h"
#include "loopback.h"

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;

static struct ibv_qp *create(enum ibv_qp_type type)
{
	struct ibv_qp_init_attr init = {
		.qp_type = type, .send_cq = cq, .recv_cq = cq, .cap = { 8, 8, 1, 1, 0 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	CHECK(qp);
	return qp;
}

static struct ibv_qp *create_dynamic(enum mlx5dv_dc_type type)
{
	struct ibv_srq_init_attr srq_init = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_DRIVER, .send_cq = cq, .recv_cq = cq,
		.comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd,
	};
	struct mlx5dv_qp_init_attr own = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC, .dc_init_attr.dc_type = type,
	};
	struct ibv_qp *qp;

	if (type == MLX5DV_DCTYPE_DCT)
		init.srq = ibv_create_srq(pd, &srq_init);
	else
		init.cap = (struct ibv_qp_cap){ .max_send_wr = 8, .max_send_sge = 1 };
	qp = mlx5dv_create_qp(context, &init, &own);
	CHECK(qp);
	return qp;
}

/* From INIT to ready to send, of a queue pair without a peer. */
static void make_ready(struct ibv_qp *qp, int at_init, int at_rtr, int at_rts)
{
	struct ibv_qp_attr attr = {
		.port_num = 1, .path_mtu = IBV_MTU_1024, .ah_attr.port_num = 1,
		.timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1,
	};

	attr.qp_state = IBV_QPS_INIT;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | at_init));
	CHECK(mlx5dv_modify_qp_lag_port(qp, 1) ==
	      (qp->qp_type == IBV_QPT_RAW_PACKET ? 0 : EOPNOTSUPP));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | at_rtr));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | at_rts));
}

/* Both ports, of a queue pair that is ready to send. */
static void both(struct ibv_qp *qp)
{
	uint8_t port = 0, active = 0, first;

	CHECK(!mlx5dv_query_qp_lag_port(qp, &first, &active));
	CHECK((first == 1 || first == 2) && active == first);
	CHECK(!mlx5dv_modify_qp_lag_port(qp, 3 - first));
	CHECK(!mlx5dv_query_qp_lag_port(qp, &port, &active));
	CHECK(port == 3 - first && active == port);
	CHECK(!mlx5dv_modify_qp_lag_port(qp, first));
	CHECK(!mlx5dv_query_qp_lag_port(qp, &port, &active));
	CHECK(port == first && active == port);
}

static void none(struct ibv_qp *qp)
{
	uint8_t port, active;

	CHECK(mlx5dv_query_qp_lag_port(qp, &port, &active) == EOPNOTSUPP);
	CHECK(mlx5dv_modify_qp_lag_port(qp, 1) == EOPNOTSUPP);
	CHECK(!ibv_destroy_qp(qp));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct mlx5dv_context features = { .comp_mask = MLX5DV_CONTEXT_MASK_NUM_LAG_PORTS };
	struct ibv_qp_attr connected = {
		.min_rnr_timer = 12, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
	};
	struct ibv_qp *qp;
	uint8_t port, active;
	int ports[3] = { 0 }, i;

	CHECK(list && list[0]);
	context = ibv_open_device(list[0]);
	CHECK(context);
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	CHECK(pd && cq);
	CHECK(!mlx5dv_query_device(context, &features));
	CHECK(features.comp_mask == MLX5DV_CONTEXT_MASK_NUM_LAG_PORTS);
	CHECK(features.num_lag_ports == 2);

	/* None before INIT; then the ports take turns. */
	for (i = 0; i < 4; i++) {
		qp = create(IBV_QPT_RC);
		CHECK(mlx5dv_query_qp_lag_port(qp, &port, &active) == EOPNOTSUPP);
		connect_to_itself(qp, connected);
		CHECK(!mlx5dv_query_qp_lag_port(qp, &port, &active));
		CHECK(port == 1 || port == 2);
		ports[port]++;
		both(qp);
		CHECK(!ibv_destroy_qp(qp));
	}
	CHECK(ports[1] == 2 && ports[2] == 2);

	qp = create(IBV_QPT_UD);
	make_ready(qp, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0, IBV_QP_SQ_PSN);
	both(qp);
	CHECK(!ibv_destroy_qp(qp));

	qp = create(IBV_QPT_RAW_PACKET);
	make_ready(qp, IBV_QP_PORT, 0, 0);
	both(qp);
	CHECK(!ibv_destroy_qp(qp));

	qp = create_dynamic(MLX5DV_DCTYPE_DCI);
	make_ready(qp, IBV_QP_PKEY_INDEX | IBV_QP_PORT, IBV_QP_AV | IBV_QP_PATH_MTU,
		   IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
			   IBV_QP_MAX_QP_RD_ATOMIC);
	both(qp);
	CHECK(!ibv_destroy_qp(qp));

	none(create_dynamic(MLX5DV_DCTYPE_DCT));
	puts("well");
	return 0;
}

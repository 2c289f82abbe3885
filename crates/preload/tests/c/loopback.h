/* Connects a queue pair to itself. Needs check.h. */
#include <infiniband/verbs.h>

/* `attr` has the access rights, timers and limits; the rest is set here. */
static inline void connect_to_itself(struct ibv_qp *qp, struct ibv_qp_attr attr)
{
	struct ibv_port_attr port;

	CHECK(!ibv_query_port(qp->context, 1, &port));
	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = qp->qp_num;
	attr.max_dest_rd_atomic = 1;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.dlid = port.lid;
	attr.ah_attr.is_global = 1;
	CHECK(!ibv_query_gid(qp->context, 1, 0, &attr.ah_attr.grh.dgid));
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
					IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr.qp_state = IBV_QPS_RTS;
	attr.max_rd_atomic = 1;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
					IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					IBV_QP_MAX_QP_RD_ATOMIC));
}

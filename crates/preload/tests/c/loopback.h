/* Connects queue pairs on one port. Needs check.h. */
#include <infiniband/verbs.h>

/* Connects a queue pair to the one of that number; a datagram queue pair to all.
 * `attr` has the access rights, timers and limits; the rest is set here. */
static inline void connect_to(struct ibv_qp *qp, uint32_t number, struct ibv_qp_attr attr)
{
	int datagrams = qp->qp_type == IBV_QPT_UD;
	int requests = qp->qp_type == IBV_QPT_RC || qp->qp_type == IBV_QPT_XRC_SEND;
	int responds = qp->qp_type == IBV_QPT_RC || qp->qp_type == IBV_QPT_XRC_RECV;
	struct ibv_port_attr port;

	CHECK(!ibv_query_port(qp->context, 1, &port));
	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					(datagrams ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = number;
	attr.max_dest_rd_atomic = 1;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.dlid = port.lid;
	attr.ah_attr.is_global = 1;
	CHECK(!ibv_query_gid(qp->context, 1, 0, &attr.ah_attr.grh.dgid));
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE |
		(datagrams ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				 IBV_QP_RQ_PSN) |
		(responds ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0)));
	attr.qp_state = IBV_QPS_RTS;
	attr.max_rd_atomic = 1;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN |
		(requests || responds ? IBV_QP_TIMEOUT : 0) |
		(requests ? IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
			    IBV_QP_MAX_QP_RD_ATOMIC : 0)));
}

static inline void connect_to_itself(struct ibv_qp *qp, struct ibv_qp_attr attr)
{
	connect_to(qp, qp->qp_num, attr);
}

/*
 * Makes one mistake, the first argument, with a queue pair that is connected to itself. Prints
 * the status of its completion, if it has one.
 */
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdlib.h>

#include "check.h"
#include "loopback.h"

static char memory[8192] __attribute__((aligned(4096)));
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;

static struct ibv_qp *queue_pair(enum ibv_qp_type type)
{
	struct ibv_qp_init_attr ask = {
		.send_cq = cq, .recv_cq = cq, .qp_type = type,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp_attr attr = {
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
		.timeout = 8, .retry_cnt = 1, .rnr_retry = 1, .min_rnr_timer = 1, .qkey = 0x22,
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &ask);

	CHECK(qp);
	connect_to_itself(qp, attr);
	return qp;
}

/* Connects to a queue pair that is not connected itself. */
static struct ibv_qp *half_connected(void)
{
	struct ibv_qp_init_attr ask = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp_attr attr = { .timeout = 8, .retry_cnt = 1, .rnr_retry = 1,
				    .min_rnr_timer = 1 };
	struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_qp *qp = ibv_create_qp(pd, &ask), *peer = ibv_create_qp(pd, &ask);

	CHECK(qp && peer);
	CHECK(!ibv_modify_qp(peer, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
						  IBV_QP_ACCESS_FLAGS));
	connect_to(qp, peer->qp_num, attr);
	return qp;
}

/* Leaves RESET for RTS. */
static int modified_wrongly(void)
{
	struct ibv_qp_init_attr ask = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };
	struct ibv_qp *qp = ibv_create_qp(pd, &ask);

	CHECK(qp);
	return ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

/* Posts as a builder what the device refuses for its lkey. */
static void build(struct ibv_mr *mr)
{
	struct ibv_qp_init_attr_ex ask = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_SEND,
	};
	struct ibv_qp_attr attr = { .qp_access_flags = IBV_ACCESS_REMOTE_WRITE, .timeout = 8,
				    .retry_cnt = 1, .rnr_retry = 1, .min_rnr_timer = 1 };
	struct ibv_qp *qp = ibv_create_qp_ex(context, &ask);
	struct ibv_qp_ex *ex;

	CHECK(qp);
	connect_to_itself(qp, attr);
	ex = ibv_qp_to_qp_ex(qp);
	for (int n = 0; n < 2; n++) {
		ibv_wr_start(ex);
		ex->wr_id = 0x70 + n;
		ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_rdma_write(ex, mr->rkey, (uintptr_t)memory + 4096);
		ibv_wr_set_sge(ex, mr->lkey + (n ? 0x100000 : 0), (uintptr_t)memory + 4096, 64);
		CHECK(!ibv_wr_complete(ex));
	}
}

/* Fails as often as that by one mistake. */
enum { OFTEN = 10000 };

static void often(struct ibv_mr *mr)
{
	struct ibv_qp_attr attr = { .timeout = 8, .retry_cnt = 1 };
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
	struct ibv_sge list = { (uintptr_t)memory, 64, mr->lkey + 0x100000 };
	struct ibv_send_wr send = { .wr_id = 0x5e, .opcode = IBV_WR_RDMA_WRITE,
				    .send_flags = IBV_SEND_SIGNALED, .sg_list = &list, .num_sge = 1 }, *bad;
	struct ibv_qp *qp = queue_pair(IBV_QPT_RC);
	struct ibv_wc wc = { 0 };

	for (int n = 0; n < OFTEN; n++) {
		if (n) {
			CHECK(!ibv_modify_qp(qp, &reset, IBV_QP_STATE));
			connect_to_itself(qp, attr);
		}
		CHECK(!ibv_post_send(qp, &send, &bad));
		while (!ibv_poll_cq(cq, 1, &wc))
			;
		CHECK(wc.status == IBV_WC_LOC_PROT_ERR);
	}
}

int main(int count, char **arguments)
{
	struct ibv_send_wr send = { .wr_id = 0x5e, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED,
				    .num_sge = 1 }, *bad;
	struct ibv_recv_wr receive = { .wr_id = 0x4e, .num_sge = 1 }, *bad_receive;
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_ah_attr path = { .is_global = 1, .port_num = 1 };
	struct ibv_mr *mr, *other;
	struct ibv_port_attr port;
	const char *mistake = arguments[1];
	struct ibv_sge list, room;
	struct ibv_qp *qp;
	struct ibv_wc wc = { 0 };
	int completes = 1;

	CHECK(count == 2 && devices && devices[0]);
	context = ibv_open_device(devices[0]);
	CHECK(context);
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	CHECK(pd && cq && !ibv_query_port(context, 1, &port));
	mr = ibv_reg_mr(pd, memory, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
	other = ibv_reg_mr(pd, memory + 4096, 4096,
			   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
				   IBV_ACCESS_REMOTE_WRITE);
	CHECK(mr && other);
	list = (struct ibv_sge){ (uintptr_t)memory, 64, mr->lkey };
	room = (struct ibv_sge){ (uintptr_t)memory + 1024, 64, mr->lkey };
	send.sg_list = &list;
	receive.sg_list = &room;
	send.wr.rdma.remote_addr = (uintptr_t)memory + 4096;
	send.wr.rdma.rkey = other->rkey;

	if (!strcmp(mistake, "busy")) {
		CHECK(ibv_dealloc_pd(pd) == EBUSY);
		return 0;
	}
	if (!strcmp(mistake, "states")) {
		CHECK(modified_wrongly() == EINVAL);
		return 0;
	}
	if (!strcmp(mistake, "full-shared")) {
		struct ibv_srq_init_attr depth = { .attr = { .max_wr = 8, .max_sge = 1 } };
		struct ibv_srq *srq = ibv_create_srq(pd, &depth);

		CHECK(srq);
		for (int n = 0; n < 1000 && !ibv_post_srq_recv(srq, &receive, &bad_receive); n++)
			;
		return 0;
	}
	if (!strcmp(mistake, "builder")) {
		build(other);
		for (int n = 0; n < 2; n += ibv_poll_cq(cq, 1, &wc))
			;
		puts(ibv_wc_status_str(wc.status));
		return 0;
	}
	if (!strcmp(mistake, "init")) {
		qp = half_connected();
		CHECK(!ibv_post_send(qp, &send, &bad));
		while (!ibv_poll_cq(cq, 1, &wc))
			;
		puts(ibv_wc_status_str(wc.status));
		return 0;
	}
	if (!strcmp(mistake, "often")) {
		often(mr);
		return 0;
	}
	qp = queue_pair(!strncmp(mistake, "ud", 2) ? IBV_QPT_UD : IBV_QPT_RC);
	if (!strcmp(mistake, "right")) {
		send.wr.rdma.remote_addr = (uintptr_t)memory + 128;
		send.wr.rdma.rkey = mr->rkey;
	} else if (!strcmp(mistake, "beyond")) {
		send.opcode = IBV_WR_RDMA_READ;
		send.wr.rdma.remote_addr = (uintptr_t)memory + 8160;
	} else if (!strcmp(mistake, "local")) {
		list.addr = (uintptr_t)memory + 4064;
	} else if (!strcmp(mistake, "key")) {
		send.wr.rdma.rkey += 0x100000;
	} else if (!strcmp(mistake, "deregistered")) {
		CHECK(!ibv_dereg_mr(other));
	} else if (!strcmp(mistake, "full")) {
		send.send_flags = 0;
		for (int n = 0; n < 1000 && !ibv_post_send(qp, &send, &bad); n++)
			;
		return 0;
	} else if (!strcmp(mistake, "no-receive")) {
		send.opcode = IBV_WR_SEND;
	} else if (!strcmp(mistake, "short")) {
		room.length = 16;
		send.opcode = IBV_WR_SEND;
		CHECK(!ibv_post_recv(qp, &receive, &bad_receive));
	} else if (!strncmp(mistake, "ud", 2)) {
		path.dlid = port.lid;
		CHECK(!ibv_query_gid(context, 1, 0, &path.grh.dgid));
		send.opcode = IBV_WR_SEND;
		send.wr.ud.ah = ibv_create_ah(pd, &path);
		send.wr.ud.remote_qpn = qp->qp_num;
		send.wr.ud.remote_qkey = !strcmp(mistake, "ud-qkey") ? 0x11 : 0x22;
		CHECK(send.wr.ud.ah);
		if (!strcmp(mistake, "ud-qkey"))
			CHECK(!ibv_post_recv(qp, &receive, &bad_receive));
	} else if (!strcmp(mistake, "well")) {
		completes = 1;
	} else {
		CHECK(!"a known mistake");
	}
	CHECK(!ibv_post_send(qp, &send, &bad));
	while (completes && !ibv_poll_cq(cq, 1, &wc))
		;
	puts(ibv_wc_status_str(wc.status));
	/* What the peer does with a datagram follows its completion. */
	for (int n = 0; n < 1000; n++)
		ibv_poll_cq(cq, 1, &wc);
	return 0;
}

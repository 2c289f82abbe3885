/*
 * Sets up a queue pair as works on one device and not on others, in the way that the first
 * argument names; with a second argument, as works everywhere. Some names are of what needs no
 * advice.
 */
#include <fcntl.h>
#include <infiniband/verbs.h>

#include "check.h"

/* Sends a message to itself, so that the limit of the shared receive queue is reached, and sets it
 * again, or not. */
static void reach_limit(struct ibv_qp *qp, struct ibv_srq *srq, int again)
{
	static char bytes[256];
	struct ibv_mr *mr = ibv_reg_mr(qp->pd, bytes, sizeof(bytes), IBV_ACCESS_LOCAL_WRITE);
	struct ibv_srq_attr limit = { .srq_limit = 1 };
	struct ibv_async_event event;
	struct ibv_sge list;
	struct ibv_recv_wr receive = { .sg_list = &list, .num_sge = 1 }, *bad;
	struct ibv_send_wr send = { .sg_list = &list, .num_sge = 1, .opcode = IBV_WR_SEND,
				    .send_flags = IBV_SEND_SIGNALED }, *bad_send;
	struct ibv_wc completion;

	CHECK(mr);
	list = (struct ibv_sge){ (uintptr_t)bytes, 64, mr->lkey };
	CHECK(!ibv_post_srq_recv(srq, &receive, &bad));
	CHECK(!ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
	list.addr += 128;
	CHECK(!ibv_post_send(qp, &send, &bad_send));
	for (int polled = 0; polled < 2;)
		polled += ibv_poll_cq(qp->send_cq, 1, &completion);
	CHECK(!ibv_get_async_event(qp->context, &event));
	CHECK(event.event_type == IBV_EVENT_SRQ_LIMIT_REACHED);
	ibv_ack_async_event(&event);
	list.addr -= 128;
	CHECK(!ibv_post_srq_recv(srq, &receive, &bad));
	if (again)
		CHECK(!ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
	CHECK(!ibv_dereg_mr(mr));
}

/* Posts a write to itself. */
static int post_write(struct ibv_qp *qp, struct ibv_sge *from, struct ibv_mr *to, int flags)
{
	struct ibv_send_wr write = { .sg_list = from, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				     .send_flags = flags,
				     .wr.rdma = { (uintptr_t)to->addr, to->rkey } }, *bad;

	return ibv_post_send(qp, &write, &bad);
}

static void wait_for(struct ibv_cq *cq)
{
	struct ibv_wc completion;

	while (!ibv_poll_cq(cq, 1, &completion))
		;
	CHECK(completion.status == IBV_WC_SUCCESS);
}

/* Writes to itself in a region with other rights, too, or not. */
static void use_region(struct ibv_qp *qp, int access)
{
	static char bytes[256];
	struct ibv_mr *mr = ibv_reg_mr(qp->pd, bytes, sizeof(bytes),
				       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | access);
	struct ibv_sge from;

	CHECK(mr);
	from = (struct ibv_sge){ (uintptr_t)bytes + 128, 8, mr->lkey };
	CHECK(!post_write(qp, &from, mr, IBV_SEND_SIGNALED));
	wait_for(qp->send_cq);
	CHECK(!ibv_dereg_mr(mr));
}

/* Has a receive, and sends of which only the last one is signaled: as many together as the
 * completion queue has entries, or one more. */
static void fill(struct ibv_qp *qp, int all)
{
	static char bytes[256];
	struct ibv_mr *mr = ibv_reg_mr(qp->pd, bytes, sizeof(bytes),
				       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_sge from, into;
	struct ibv_recv_wr receive = { .sg_list = &into, .num_sge = 1 }, *bad;

	CHECK(mr);
	into = (struct ibv_sge){ (uintptr_t)bytes + 192, 64, mr->lkey };
	from = (struct ibv_sge){ (uintptr_t)bytes + 128, 8, mr->lkey };
	CHECK(!ibv_post_recv(qp, &receive, &bad));
	for (int n = 0; n < all - 1; n++)
		CHECK(!post_write(qp, &from, mr, n == all - 2 ? IBV_SEND_SIGNALED : 0));
	wait_for(qp->send_cq);
	CHECK(!ibv_dereg_mr(mr));
}

/* Waits for the event of a completion that may have come before it was asked for: polls again
 * before that, or not. */
static void wait_for_event(struct ibv_qp *qp, struct ibv_comp_channel *channel, int again)
{
	static char bytes[256];
	struct ibv_mr *mr = ibv_reg_mr(qp->pd, bytes, sizeof(bytes),
				       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_sge from = { (uintptr_t)bytes + 128, 8, mr->lkey };
	struct ibv_cq *cq = qp->send_cq;
	struct ibv_wc completion;
	void *program;
	int found = 0;

	/* All is polled before the request. */
	CHECK(!ibv_req_notify_cq(cq, 0));
	CHECK(!post_write(qp, &from, mr, IBV_SEND_SIGNALED));
	CHECK(!ibv_get_cq_event(channel, &cq, &program));
	wait_for(cq);
	CHECK(!post_write(qp, &from, mr, IBV_SEND_SIGNALED));
	CHECK(!post_write(qp, &from, mr, IBV_SEND_SIGNALED));
	usleep(200000);
	CHECK(!ibv_req_notify_cq(cq, 0));
	while (again && found < 2)
		found += ibv_poll_cq(cq, 1, &completion);
	if (again)
		CHECK(!post_write(qp, &from, mr, IBV_SEND_SIGNALED));
	CHECK(!ibv_get_cq_event(channel, &cq, &program));
	ibv_ack_cq_events(cq, 2);
	CHECK(!ibv_dereg_mr(mr));
}

/* Returns the index of the first GID that is not link-local, from the whole table. */
static int index_from_table(struct ibv_context *context, struct ibv_gid_entry *entry)
{
	struct ibv_gid_entry entries[64];
	ssize_t all = ibv_query_gid_table(context, entries, 64, 0);

	CHECK(all > 0);
	for (ssize_t n = 0; n < all; n++) {
		*entry = entries[n];
		if (entry->gid.raw[0] != 0xfe)
			return entry->gid_index;
	}
	return -1;
}

int main(int count, char **arguments)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	const char *what = count == 2 ? arguments[1] : "";
	struct ibv_context *context;
	struct ibv_qp_init_attr ask = {
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1,
			 .max_recv_sge = 1, .max_inline_data = 64 },
	};
	struct ibv_qp_attr attr = {
		.qp_access_flags = IBV_ACCESS_REMOTE_READ, .port_num = 1,
		.path_mtu = IBV_MTU_1024, .max_rd_atomic = 1, .max_dest_rd_atomic = 1,
		.min_rnr_timer = 12, .timeout = 14, .retry_cnt = 6, .rnr_retry = 6,
	};
	struct ibv_srq_init_attr ask_srq = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_gid_entry entry = { 0 };
	struct ibv_comp_channel *channel = NULL;
	struct ibv_srq *srq = NULL;
	struct ibv_qp *qp;
	struct ibv_pd *pd;
	int index = -1, fills = 0, waits = 0, writes = 0, manages, is_infiniband;
	struct ibv_port_attr port;

	CHECK(devices && devices[0]);
	context = ibv_open_device(devices[0]);
	CHECK(context);
	pd = ibv_alloc_pd(context);
	manages = !strcmp(what, "manager");
	/* As the connection manager does. */
	if (manages)
		CHECK(open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC) >= 0);
	if (count > 1) {
		fills = !strcmp(arguments[1], "unsignaled-in-mixed-queue");
		waits = !strcmp(arguments[1], "completions-left");
		writes = fills || waits || manages || !strncmp(arguments[1], "unused-rights", 13);
	}
	if (waits) {
		channel = ibv_create_comp_channel(context);
		CHECK(channel);
	}
	ask.send_cq = ask.recv_cq = ibv_create_cq(context, fills ? 7 : 64, NULL, channel, 0);
	CHECK(pd && ask.send_cq);
	CHECK(!ibv_query_port(context, 1, &port));
	is_infiniband = port.link_layer == IBV_LINK_LAYER_INFINIBAND;
	if (!strcmp(what, "gid-of-port"))
		index = 0;
	if (!strcmp(what, "gid-table"))
		index = index_from_table(context, &entry);
	/* The first GID that is link-local, or is not; of InfiniBand, all are. */
	for (int n = 0; n < 16 && index < 0; n++) {
		if (ibv_query_gid_ex(context, 1, n, &entry, 0))
			continue;
		if ((entry.gid.raw[0] == 0xfe) == !strcmp(what, "link-local-gid") || is_infiniband)
			index = n;
	}
	CHECK(index >= 0);
	if (!strcmp(what, "long-queue"))
		ask.cap.max_recv_wr = 20000;
	if (!strcmp(what, "long-inline-data"))
		ask.cap.max_inline_data = 400;
	if (count > 1 && !strcmp(arguments[1], "limit-not-set-again")) {
		srq = ask.srq = ibv_create_srq(pd, &ask_srq);
		CHECK(srq);
	}
	qp = ibv_create_qp(pd, &ask);
	CHECK(qp);
	attr.ah_attr.port_num = 1;
	attr.ah_attr.is_global = !!strcmp(what, "no-global-route");
	attr.ah_attr.dlid = port.lid;
	/* The entry after it has the same address, and another version of RoCE. */
	attr.ah_attr.grh.sgid_index = index + (!strcmp(what, "fixed-gid-index") || manages);
	attr.ah_attr.grh.dgid = entry.gid;
	attr.ah_attr.grh.hop_limit = strcmp(what, "hop-limit") ? 64 : 1;
	attr.dest_qp_num = qp->qp_num;
	if (!strcmp(what, "no-reads-accepted"))
		attr.max_dest_rd_atomic = 0;
	if (!strcmp(what, "no-timeout"))
		attr.timeout = 0;
	if (!strcmp(what, "short-timeout"))
		attr.timeout = 8;
	if (!strcmp(what, "no-retries"))
		attr.retry_cnt = 0;
	if (!strcmp(what, "endless-retries"))
		attr.rnr_retry = 7;
	if (srq)
		attr.qp_access_flags = 0;
	if (writes)
		attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
	if (!strcmp(what, "unused-rights/queue-pair") || manages)
		attr.qp_access_flags |= IBV_ACCESS_REMOTE_ATOMIC;
	attr.qp_state = IBV_QPS_INIT;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
					IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
					IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					IBV_QP_MAX_QP_RD_ATOMIC));
	if (srq)
		reach_limit(qp, srq, count > 2);
	if (writes && !fills && !waits)
		use_region(qp, !strcmp(what, "unused-rights") ? IBV_ACCESS_REMOTE_READ : 0);
	if (fills)
		fill(qp, ask.send_cq->cqe + (count == 2));
	if (channel)
		wait_for_event(qp, channel, count > 2);
	CHECK(!ibv_destroy_qp(qp) && (!srq || !ibv_destroy_srq(srq)));
	CHECK(!ibv_destroy_cq(ask.send_cq) && !ibv_dealloc_pd(pd));
	CHECK(!channel || !ibv_destroy_comp_channel(channel));
	CHECK(!ibv_close_device(context));
	return 0;
}

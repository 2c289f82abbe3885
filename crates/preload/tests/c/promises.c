/*
 * What the device's capability flags promise, on one port; packets.c covers those of raw packets
 * and flows. Prints "well".
 */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "loopback.h"

#define COMMON 0x01321c26
#define PACKETS 0x24000000
#define QKEY 0x11111111

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static char memory[4096] __attribute__((aligned(4096)));

static struct ibv_qp *new_qp(enum ibv_qp_type type)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = type, .cap = { 8, 8, 1, 1, 0 },
	};
	struct ibv_qp *qp;

	if (type == IBV_QPT_XRC_SEND)
		init.cap.max_recv_wr = init.cap.max_recv_sge = 0;
	CHECK((qp = ibv_create_qp(pd, &init)));
	return qp;
}

static struct ibv_qp_attr attributes(int rnr_retry)
{
	return (struct ibv_qp_attr){
		.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
				   IBV_ACCESS_REMOTE_READ | IBV_ACCESS_MW_BIND,
		.qkey = QKEY, .timeout = 14, .retry_cnt = 7, .rnr_retry = rnr_retry,
		.min_rnr_timer = 1,
	};
}

static struct ibv_wc completion(void)
{
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;

	while (ibv_poll_cq(cq, 1, &wc) != 1)
		CHECK(time(NULL) < end);
	return wc;
}

static struct ibv_sge part(int at, int length)
{
	return (struct ibv_sge){ (uintptr_t)memory + at, length, mr->lkey };
}

static void post(struct ibv_qp *qp, struct ibv_send_wr wr)
{
	struct ibv_send_wr *bad;

	wr.send_flags |= IBV_SEND_SIGNALED;
	CHECK(!ibv_post_send(qp, &wr, &bad));
}

static void receive(struct ibv_qp *qp)
{
	struct ibv_sge sge = part(2048, 2048);
	struct ibv_recv_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad;

	CHECK(!ibv_post_recv(qp, &wr, &bad));
}

/* RC_RNR_NAK_GEN: a send without a receive fails after its retries. */
static void reports_unready_receivers(void)
{
	struct ibv_qp *qp = new_qp(IBV_QPT_RC);
	struct ibv_sge sge = part(0, 8);

	connect_to_itself(qp, attributes(0));
	post(qp, (struct ibv_send_wr){ .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND });
	CHECK(completion().status == IBV_WC_RNR_RETRY_EXC_ERR);
	CHECK(!ibv_destroy_qp(qp));
}

/* BAD_QKEY_CNTR: the port counts datagrams with a wrong queue key. */
static void counts_wrong_keys(void)
{
	struct ibv_qp *qp = new_qp(IBV_QPT_UD);
	struct ibv_ah_attr path = { .port_num = 1, .is_global = 1 };
	struct ibv_sge sge = part(0, 8);
	struct ibv_port_attr before, after;
	struct ibv_ah *ah;

	connect_to_itself(qp, attributes(0));
	CHECK(!ibv_query_port(context, 1, &before));
	path.dlid = before.lid;
	CHECK(!ibv_query_gid(context, 1, 0, &path.grh.dgid));
	CHECK((ah = ibv_create_ah(pd, &path)));
	receive(qp);
	for (int wrong = 3; wrong >= 0; wrong--) {
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND };

		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = qp->qp_num;
		wr.wr.ud.remote_qkey = QKEY + wrong;
		post(qp, wr);
		CHECK(completion().status == IBV_WC_SUCCESS);
	}
	/* The datagram with the right key has arrived after those with wrong ones. */
	CHECK(completion().wr_id == 1);
	CHECK(!ibv_query_port(context, 1, &after));
	CHECK(after.qkey_viol_cntr == before.qkey_viol_cntr + 3);
	CHECK(after.bad_pkey_cntr == before.bad_pkey_cntr);
	CHECK(!ibv_destroy_ah(ah));
	CHECK(!ibv_destroy_qp(qp));
}

/* MEM_WINDOW, MEM_WINDOW_TYPE_2B, MEM_MGT_EXTENSIONS: windows are bound and written through, and
 * invalidated here and by the peer's send. */
static void binds_and_invalidates(void)
{
	struct ibv_qp *qp = new_qp(IBV_QPT_RC);
	struct ibv_mw_bind_info range = {
		.mr = mr, .addr = (uintptr_t)memory, .length = 1024,
		.mw_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
	struct ibv_sge sge = part(2048, 8);
	struct ibv_send_wr write = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE };
	struct ibv_mw_bind bind = { .send_flags = IBV_SEND_SIGNALED, .bind_info = range };
	struct ibv_mw *one = ibv_alloc_mw(pd, IBV_MW_TYPE_1);
	struct ibv_mw *two = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
	struct ibv_wc wc;

	CHECK(one && two);
	connect_to_itself(qp, attributes(7));
	CHECK(!ibv_bind_mw(qp, one, &bind));
	CHECK(completion().status == IBV_WC_SUCCESS);
	write.wr.rdma.remote_addr = (uintptr_t)memory;
	write.wr.rdma.rkey = one->rkey;
	post(qp, write);
	CHECK(completion().status == IBV_WC_SUCCESS);
	for (int by_peer = 0; by_peer < 2; by_peer++) {
		struct ibv_send_wr wr = { .opcode = IBV_WR_BIND_MW };
		uint32_t rkey = ibv_inc_rkey(two->rkey);

		wr.bind_mw.mw = two;
		wr.bind_mw.rkey = rkey;
		wr.bind_mw.bind_info = range;
		post(qp, wr);
		wc = completion();
		CHECK(wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW);
		two->rkey = rkey;
		write.wr.rdma.rkey = rkey;
		post(qp, write);
		CHECK(completion().status == IBV_WC_SUCCESS);
		if (by_peer)
			receive(qp);
		post(qp, (struct ibv_send_wr){
			.opcode = by_peer ? IBV_WR_SEND_WITH_INV : IBV_WR_LOCAL_INV,
			.invalidate_rkey = rkey,
		});
		/* Two completions, in either order, of a send to itself. */
		for (int left = 1 + by_peer; left > 0; left--) {
			wc = completion();
			CHECK(wc.status == IBV_WC_SUCCESS);
			if (wc.wr_id == 1)
				CHECK(wc.wc_flags & IBV_WC_WITH_INV && wc.invalidated_rkey == rkey);
		}
	}
	/* The last invalidation holds: the write fails. */
	post(qp, write);
	wc = completion();
	/* Its queue pair is the responder too, whose error flushes. */
	CHECK(wc.status == IBV_WC_REM_ACCESS_ERR || wc.status == IBV_WC_WR_FLUSH_ERR);
	CHECK(!ibv_destroy_qp(qp));
	CHECK(!ibv_dealloc_mw(one) && !ibv_dealloc_mw(two));
}

/* XRC: domains, and queue pairs that name a shared receive queue. */
static void has_xrc(void)
{
	struct ibv_xrcd_init_attr init = {
		.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1,
		.oflags = 0100,
	};
	struct ibv_xrcd *xrcd = ibv_open_xrcd(context, &init);
	struct ibv_srq_init_attr_ex queue = {
		.attr = { 8, 1, 0 }, .pd = pd, .xrcd = xrcd, .cq = cq, .srq_type = IBV_SRQT_XRC,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
			     IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
	};
	struct ibv_qp_init_attr_ex target = {
		.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd,
	};
	struct ibv_sge sge = part(0, 8);
	struct ibv_recv_wr room = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND };
	struct ibv_qp *from = new_qp(IBV_QPT_XRC_SEND), *to;
	struct ibv_srq *srq;
	uint32_t number;

	CHECK(xrcd && (srq = ibv_create_srq_ex(context, &queue)));
	CHECK(!ibv_get_srq_num(srq, &number) && !ibv_post_srq_recv(srq, &room, &bad));
	CHECK((to = ibv_create_qp_ex(context, &target)));
	connect_to(to, from->qp_num, attributes(7));
	connect_to(from, to->qp_num, attributes(7));
	wr.qp_type.xrc.remote_srqn = number;
	post(from, wr);
	CHECK(completion().status == IBV_WC_SUCCESS && completion().status == IBV_WC_SUCCESS);
	CHECK(!ibv_destroy_qp(from) && !ibv_destroy_qp(to));
	CHECK(!ibv_destroy_srq(srq) && !ibv_close_xrcd(xrcd));
}

/* The limits are what queues and objects can have. */
static void keeps_limits(const struct ibv_device_attr_ex *device)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { device->orig_attr.max_qp_wr, device->orig_attr.max_qp_wr, 1, 1, 0 },
	};
	struct ibv_modify_cq_attr slow = {
		.attr_mask = IBV_CQ_ATTR_MODERATE,
		.moderate = { device->cq_mod_caps.max_cq_count, device->cq_mod_caps.max_cq_period },
	};
	struct ibv_modify_cq_attr none = { .attr_mask = IBV_CQ_ATTR_MODERATE };
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	CHECK(qp && !ibv_destroy_qp(qp));
	CHECK(device->cq_mod_caps.max_cq_period == 4095);
	CHECK(!ibv_modify_cq(cq, &slow) && !ibv_modify_cq(cq, &none));
	slow.moderate.cq_period++;
	CHECK(ibv_modify_cq(cq, &slow));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_device_attr_ex device;
	struct ibv_port_attr port;
	__be16 pkey;

	CHECK(list && list[0] && (context = ibv_open_device(list[0])));
	CHECK(!ibv_query_device_ex(context, NULL, &device) && !ibv_query_port(context, 1, &port));
	CHECK(device.orig_attr.device_cap_flags ==
	      (port.link_layer == IBV_LINK_LAYER_ETHERNET ? COMMON | PACKETS : COMMON));
	CHECK(device.device_cap_flags_ex == device.orig_attr.device_cap_flags);
	CHECK(device.orig_attr.sys_image_guid == device.orig_attr.node_guid);
	CHECK(device.orig_attr.node_guid);
	CHECK(port.state == IBV_PORT_ACTIVE);
	CHECK(device.orig_attr.max_pkeys == 128);
	CHECK(port.pkey_tbl_len == (port.link_layer == IBV_LINK_LAYER_ETHERNET ? 1 : 128));
	for (int index = 0; index < port.pkey_tbl_len; index++)
		CHECK(!ibv_query_pkey(context, 1, index, &pkey) && pkey == (index ? 0 : 0xffff));
	CHECK(device.completion_timestamp_mask == 0x7fffffffffffffff);
	CHECK((pd = ibv_alloc_pd(context)) && (cq = ibv_create_cq(context, 64, NULL, NULL, 0)));
	mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE |
			IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND);
	CHECK(mr);
	keeps_limits(&device);
	reports_unready_receivers();
	counts_wrong_keys();
	binds_and_invalidates();
	has_xrc();
	CHECK(!ibv_dereg_mr(mr) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	puts("well");
	return 0;
}

/*
 * Raw packets from one context to another, with flows and with checksums computed and
 * checked. It says "well" if all was as it should be.
 */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define FRAMES 40
#define LENGTH 47
#define ROOM 2048

/* A UDP packet of 5 bytes in IPv4, without checksums. */
static const unsigned char udp[] =
	"\x02\0\0\0\0\x07\x02\0\0\0\x01\x01\x08\0"
	"\x45\0\0\x21\0\0\0\0\x40\x11\0\0\x0a\0\0\x01\x0a\0\0\x02"
	"\0\x07\0\x09\0\x0d\0\0hello";

struct side {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	unsigned char *memory;
};

static void open_side(struct side *side, struct ibv_device *device)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RAW_PACKET,
					 .cap = { 16, 16, 1, 1, 0 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	CHECK((side->context = ibv_open_device(device)));
	CHECK((side->pd = ibv_alloc_pd(side->context)));
	CHECK((side->cq = ibv_create_cq(side->context, 64, NULL, NULL, 0)));
	init.send_cq = init.recv_cq = side->cq;
	CHECK((side->qp = ibv_create_qp(side->pd, &init)));
	CHECK((side->memory = aligned_alloc(4096, 4096)));
	side->mr = ibv_reg_mr(side->pd, side->memory, 4096, IBV_ACCESS_LOCAL_WRITE);
	CHECK(side->mr);
	CHECK(!ibv_modify_qp(side->qp, &attr, IBV_QP_STATE | IBV_QP_PORT));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(side->qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(side->qp, &attr, IBV_QP_STATE));
}

static void close_side(struct side *side)
{
	CHECK(!ibv_destroy_qp(side->qp));
	CHECK(!ibv_dereg_mr(side->mr));
	CHECK(!ibv_destroy_cq(side->cq));
	CHECK(!ibv_dealloc_pd(side->pd));
	CHECK(!ibv_close_device(side->context));
	free(side->memory);
}

static struct ibv_wc wait_for(struct ibv_cq *cq)
{
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;

	while (ibv_poll_cq(cq, 1, &wc) != 1)
		CHECK(time(NULL) < end);
	CHECK(wc.status == IBV_WC_SUCCESS);
	return wc;
}

int main(void)
{
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_eth eth;
	} rule = {
		.attr = { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(rule),
			  .num_of_specs = 1, .port = 1 },
		.eth = { .type = IBV_FLOW_SPEC_ETH, .size = sizeof(rule.eth) },
	};
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_device_attr device;
	struct ibv_flow *flow;
	struct side a, b;

	CHECK(list && list[0]);
	open_side(&a, list[0]);
	open_side(&b, list[0]);
	CHECK(!ibv_query_device(a.context, &device));
	CHECK(device.device_cap_flags & IBV_DEVICE_RAW_IP_CSUM);
	memcpy(rule.eth.val.dst_mac, udp, 6);
	memset(rule.eth.mask.dst_mac, 0xff, 6);
	CHECK((flow = ibv_create_flow(b.qp, &rule.attr)));
	for (int number = 0; number < FRAMES; number++) {
		struct ibv_sge in = { (uintptr_t)b.memory, ROOM, b.mr->lkey };
		struct ibv_recv_wr receive = { .wr_id = 100 + number, .sg_list = &in,
					       .num_sge = 1 }, *bad_receive;
		struct ibv_sge out = { (uintptr_t)a.memory, LENGTH, a.mr->lkey };
		struct ibv_send_wr send = { .wr_id = number, .sg_list = &out, .num_sge = 1,
					    .opcode = IBV_WR_SEND,
					    .send_flags = IBV_SEND_SIGNALED }, *bad_send;
		int checksums = number % 2;
		struct ibv_wc wc;

		if (checksums)
			send.send_flags |= IBV_SEND_IP_CSUM;
		memcpy(a.memory, udp, LENGTH);
		a.memory[LENGTH - 1] = number;
		CHECK(!ibv_post_recv(b.qp, &receive, &bad_receive));
		CHECK(!ibv_post_send(a.qp, &send, &bad_send));
		CHECK(wait_for(a.cq).wr_id == send.wr_id);
		wc = wait_for(b.cq);
		CHECK(wc.wr_id == receive.wr_id && wc.byte_len == LENGTH);
		CHECK(!(wc.wc_flags & IBV_WC_IP_CSUM_OK) == !checksums);
		CHECK(b.memory[LENGTH - 1] == number);
		if (!checksums)
			CHECK(!memcmp(b.memory, a.memory, LENGTH));
	}
	CHECK(ibv_destroy_qp(b.qp) == EBUSY);
	CHECK(!ibv_destroy_flow(flow));
	close_side(&b);
	close_side(&a);
	ibv_free_device_list(list);
	puts("well");
	return 0;
}

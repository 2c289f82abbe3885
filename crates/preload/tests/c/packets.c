/*
 * Raw packets from one context to another, with checksums computed and checked, by flows that
 * count them or change their headers. It says "well" if all was as it should be.
 */
#include <endian.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdint.h>
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

/* Sends a frame and receives it. */
static void exchange(struct side *a, struct side *b, int number, int checksums)
{
	struct ibv_sge in = { (uintptr_t)b->memory, ROOM, b->mr->lkey };
	struct ibv_recv_wr receive = { .wr_id = 100 + number, .sg_list = &in,
				       .num_sge = 1 }, *bad_receive;
	struct ibv_sge out = { (uintptr_t)a->memory, LENGTH, a->mr->lkey };
	struct ibv_send_wr send = { .wr_id = number, .sg_list = &out, .num_sge = 1,
				    .opcode = IBV_WR_SEND,
				    .send_flags = IBV_SEND_SIGNALED }, *bad_send;
	struct ibv_wc wc;

	if (checksums)
		send.send_flags |= IBV_SEND_IP_CSUM;
	memcpy(a->memory, udp, LENGTH);
	a->memory[LENGTH - 1] = number;
	CHECK(!ibv_post_recv(b->qp, &receive, &bad_receive));
	CHECK(!ibv_post_send(a->qp, &send, &bad_send));
	CHECK(wait_for(a->cq).wr_id == send.wr_id);
	wc = wait_for(b->cq);
	CHECK(wc.wr_id == receive.wr_id && wc.byte_len == LENGTH);
	CHECK(!(wc.wc_flags & IBV_WC_IP_CSUM_OK) == !checksums);
	CHECK(b->memory[LENGTH - 1] == number);
}

/* Receives by addresses and ports, with the specification that has no other fields. */
static void match_addresses(struct side *a, struct side *b)
{
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_eth eth;
		struct ibv_flow_spec_ipv4 ip;
		struct ibv_flow_spec_tcp_udp udp;
	} __attribute__((packed, aligned(8))) rule = {
		.attr = { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(rule),
			  .num_of_specs = 3, .port = 1 },
		.eth = { .type = IBV_FLOW_SPEC_ETH, .size = sizeof(rule.eth) },
		.ip = { .type = IBV_FLOW_SPEC_IPV4, .size = sizeof(rule.ip) },
		.udp = { .type = IBV_FLOW_SPEC_UDP, .size = sizeof(rule.udp) },
	};
	struct ibv_flow *flow;

	memcpy(rule.eth.val.dst_mac, udp, 6);
	memset(rule.eth.mask.dst_mac, 0xff, 6);
	memcpy(&rule.ip.val.dst_ip, udp + 30, 4);
	memset(&rule.ip.mask.dst_ip, 0xff, 4);
	memcpy(&rule.udp.val.dst_port, udp + 36, 2);
	memset(&rule.udp.mask.dst_port, 0xff, 2);
	CHECK((flow = ibv_create_flow(b->qp, (struct ibv_flow_attr *)&rule)));
	exchange(a, b, 7, 0);
	CHECK(!ibv_destroy_flow(flow));
}

static void count_frames(struct side *a, struct side *b)
{
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_eth eth;
		struct ibv_flow_spec_counter_action count;
	} __attribute__((packed, aligned(8))) rule = {
		.attr = { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(rule),
			  .num_of_specs = 2, .port = 1 },
		.eth = { .type = IBV_FLOW_SPEC_ETH, .size = sizeof(rule.eth) },
		.count = { .type = IBV_FLOW_SPEC_ACTION_COUNT, .size = sizeof(rule.count) },
	};
	struct ibv_counters_init_attr init = { 0 };
	struct ibv_counter_attach_attr bytes = { IBV_COUNTER_BYTES, 0, 0 };
	struct ibv_counter_attach_attr packets = { IBV_COUNTER_PACKETS, 1, 0 };
	struct ibv_counters *counters;
	struct ibv_flow *flow;
	uint64_t values[2];

	CHECK((counters = ibv_create_counters(b->context, &init)));
	CHECK(!ibv_attach_counters_point_flow(counters, &bytes, NULL));
	CHECK(!ibv_attach_counters_point_flow(counters, &packets, NULL));
	memcpy(rule.eth.val.dst_mac, udp, 6);
	memset(rule.eth.mask.dst_mac, 0xff, 6);
	rule.count.counters = counters;
	CHECK((flow = ibv_create_flow(b->qp, (struct ibv_flow_attr *)&rule)));
	for (int number = 0; number < FRAMES; number++) {
		exchange(a, b, number, number % 2);
		if (number % 2 == 0)
			CHECK(!memcmp(b->memory, a->memory, LENGTH));
	}
	CHECK(!ibv_read_counters(counters, values, 2, IBV_READ_COUNTERS_ATTR_PREFER_CACHED));
	CHECK(values[0] == FRAMES * LENGTH && values[1] == FRAMES);
	CHECK(ibv_destroy_qp(b->qp) == EBUSY);
	CHECK(ibv_destroy_counters(counters) == EBUSY);
	CHECK(!ibv_destroy_flow(flow));
	CHECK(!ibv_destroy_counters(counters));
}

static void change_headers(struct side *a, struct side *b)
{
	/* Sets the destination port of UDP, in the device's format. */
	uint64_t set_port = htobe64(0x100c001000000050);
	uint8_t alloc[16] = { 0x9, 0x39 }, query[32] = { 0x9, 0x3b }, answer[32];
	union {
		struct mlx5dv_flow_match_parameters parameters;
		uint64_t room[9];
	} all = { { 64 } };
	struct mlx5dv_flow_matcher_attr init = { .type = IBV_FLOW_ATTR_NORMAL,
						 .match_mask = &all.parameters };
	struct mlx5dv_flow_action_attr actions[3] = {
		{ .type = MLX5DV_FLOW_ACTION_DEST_IBV_QP, .qp = b->qp },
		{ .type = MLX5DV_FLOW_ACTION_IBV_FLOW_ACTION },
		{ .type = MLX5DV_FLOW_ACTION_COUNTERS_DEVX },
	};
	struct mlx5dv_flow_matcher *matcher;
	struct ibv_flow_action *action;
	struct mlx5dv_devx_obj *counter;
	struct ibv_flow *flow;

	CHECK((matcher = mlx5dv_create_flow_matcher(b->context, &init)));
	action = mlx5dv_create_flow_action_modify_header(b->context, 8, &set_port,
							 MLX5DV_FLOW_TABLE_TYPE_NIC_RX);
	CHECK((actions[1].action = action));
	counter = mlx5dv_devx_obj_create(b->context, alloc, 16, answer, 16);
	CHECK((actions[2].obj = counter));
	memcpy(query + 28, answer + 8, 4);
	CHECK((flow = mlx5dv_create_flow(matcher, &all.parameters, 3, actions)));
	exchange(a, b, 0, 0);
	a->memory[37] = 0x50;
	CHECK(!memcmp(b->memory, a->memory, LENGTH));
	CHECK(!mlx5dv_devx_obj_query(counter, query, 32, answer, 32));
	CHECK(answer[23] == 1 && answer[31] == LENGTH);
	CHECK(ibv_destroy_flow_action(action) == EBUSY);
	CHECK(!ibv_destroy_flow(flow));
	CHECK(!ibv_destroy_flow_action(action));
	CHECK(!mlx5dv_devx_obj_destroy(counter));
	CHECK(!mlx5dv_destroy_flow_matcher(matcher));
}

/* A TCP packet is sent in segments, each with headers of its own. */
static void segments(struct side *a, struct side *b)
{
	enum { HEADERS = 54, DATA = 1000, MSS = 400 };
	static const unsigned char tcp[HEADERS] =
		"\x02\0\0\0\0\x07\x02\0\0\0\x01\x01\x08\0"
		"\x45\0\x04\x10\0\0\0\0\x40\x06\0\0\x0a\0\0\x01\x0a\0\0\x02"
		"\0\x07\0\x09\0\0\0\x01\0\0\0\0\x50\x10\xff\xff\0\0\0";
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_eth eth;
	} __attribute__((packed, aligned(8))) rule = {
		.attr = { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(rule), .num_of_specs = 1,
			  .port = 1 },
		.eth = { .type = IBV_FLOW_SPEC_ETH, .size = sizeof(rule.eth) },
	};
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_RAW_PACKET, .cap = { 16, 16, 1, 1, 0 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_MAX_TSO_HEADER,
		.send_cq = a->cq, .recv_cq = a->cq, .pd = a->pd, .max_tso_header = HEADERS,
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct ibv_sge out = { (uintptr_t)a->memory, DATA, a->mr->lkey };
	struct ibv_send_wr send = { .sg_list = &out, .num_sge = 1, .opcode = IBV_WR_TSO,
				    .send_flags = IBV_SEND_SIGNALED | IBV_SEND_IP_CSUM },
			   *bad_send;
	struct ibv_device_attr_ex device;
	struct ibv_flow *flow;
	struct ibv_qp *qp;

	CHECK(!ibv_query_device_ex(a->context, NULL, &device));
	CHECK(device.tso_caps.max_tso == 65536);
	CHECK(device.tso_caps.supported_qpts == 1 << IBV_QPT_RAW_PACKET);
	CHECK((qp = ibv_create_qp_ex(a->context, &init)));
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	memcpy(rule.eth.val.dst_mac, tcp, 6);
	memset(rule.eth.mask.dst_mac, 0xff, 6);
	CHECK((flow = ibv_create_flow(b->qp, (struct ibv_flow_attr *)&rule)));
	for (int number = 0; number < 3; number++) {
		struct ibv_sge in = { (uintptr_t)b->memory + 1024 * number, 1024, b->mr->lkey };
		struct ibv_recv_wr receive = { .wr_id = number, .sg_list = &in, .num_sge = 1 },
				   *bad;

		CHECK(!ibv_post_recv(b->qp, &receive, &bad));
	}
	for (int at = 0; at < DATA; at++)
		a->memory[at] = at % 251;
	send.tso.hdr = (void *)tcp;
	send.tso.hdr_sz = HEADERS;
	send.tso.mss = MSS;
	CHECK(!ibv_post_send(qp, &send, &bad_send));
	wait_for(a->cq);
	for (int number = 0; number < 3; number++) {
		unsigned char *frame = b->memory + 1024 * number;
		unsigned length = number < 2 ? MSS : DATA - 2 * MSS;
		struct ibv_wc wc = wait_for(b->cq);
		uint32_t sequence;

		CHECK(wc.wr_id == (uint64_t)number && wc.byte_len == HEADERS + length);
		CHECK(wc.wc_flags & IBV_WC_IP_CSUM_OK);
		CHECK(frame[16] * 256u + frame[17] == HEADERS - 14 + length);
		memcpy(&sequence, frame + 38, 4);
		CHECK(be32toh(sequence) == 1u + MSS * number);
		CHECK(!memcmp(frame + HEADERS, a->memory + MSS * number, length));
	}
	CHECK(!ibv_destroy_flow(flow));
	CHECK(!ibv_destroy_qp(qp));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_device_attr device;
	struct side a, b;

	CHECK(list && list[0]);
	open_side(&a, list[0]);
	open_side(&b, list[0]);
	CHECK(!ibv_query_device(a.context, &device));
	CHECK(device.device_cap_flags & IBV_DEVICE_RAW_IP_CSUM);
	CHECK(device.device_cap_flags & IBV_DEVICE_MANAGED_FLOW_STEERING);
	match_addresses(&a, &b);
	count_frames(&a, &b);
	change_headers(&a, &b);
	segments(&a, &b);
	close_side(&b);
	close_side(&a);
	ibv_free_device_list(list);
	puts("well");
	return 0;
}

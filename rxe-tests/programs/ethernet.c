/* SPDX-License-Identifier: MIT */
/*
 * Raw packets: segmentation, VLAN stripping, checksums, flow tags, counters,
 * striding receive queues, flow actions; device memory. The frames match a flow of
 * another context of the device: a context does not receive its own frames.
 * usage: ethernet CASE...|all
 */
#include "common.h"
#include <infiniband/mlx5dv.h>

#define FRAMES 16
#define BUFFER_SIZE 2048
#define HEADERS 54
#define TAG 0xabcde

static const uint8_t to[6] = {0x24, 0x8a, 0x07, 0xa5, 0x28, 0xc8};
static const uint8_t from[6] = {0x24, 0x8a, 0x07, 0xa5, 0x28, 0xc9};

struct ends {
	struct ibv_context *ctx, *recv_ctx;
	struct ibv_pd *pd, *recv_pd;
	struct ibv_cq *sent;
	struct ibv_cq_ex *got;
	struct ibv_qp *send, *recv;
	struct ibv_flow *flow;
	struct ibv_mr *mr, *recv_mr;
	uint8_t *buf; /* the frame to send, then FRAMES receive buffers */
	struct ibv_device_attr_ex attr;
};

static struct ibv_qp *create_packet_qp_dv(struct ibv_pd *pd, struct ibv_cq *cq,
				     uint32_t create_flags, uint16_t tso_header,
					  uint32_t dv_flags)
{
	struct mlx5dv_qp_init_attr dv_init = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS,
		.create_flags = dv_flags,
	};
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = {.max_send_wr = 16, .max_recv_wr = FRAMES,
			.max_send_sge = 2, .max_recv_sge = 1},
		.qp_type = IBV_QPT_RAW_PACKET,
		.comp_mask = IBV_QP_INIT_ATTR_PD,
		.pd = pd,
		.create_flags = create_flags,
		.max_tso_header = tso_header,
		.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_TSO,
	};
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
	struct ibv_qp *qp;

	if (create_flags)
		init.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
	if (tso_header)
		init.comp_mask |= IBV_QP_INIT_ATTR_MAX_TSO_HEADER |
				  IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	qp = MUST(dv_flags ? mlx5dv_create_qp(pd->context, &init, &dv_init) :
			      ibv_create_qp_ex(pd->context, &init));
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT));
	attr.qp_state = IBV_QPS_RTR;
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	OK(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	return qp;
}

static struct ibv_qp *create_packet_qp(struct ibv_pd *pd, struct ibv_cq *cq,
				uint32_t create_flags, uint16_t tso_header)
{
	return create_packet_qp_dv(pd, cq, create_flags, tso_header, 0);
}

static void open_ends(struct ends *e, uint32_t create_flags)
{
	struct ibv_cq_init_attr_ex init = {
		.cqe = 64,
		.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_CVLAN |
			    IBV_WC_EX_WITH_FLOW_TAG,
	};
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_eth eth;
		struct ibv_flow_spec_action_tag tag;
	} flow = {
		.attr = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(flow),
			 .num_of_specs = 2, .port = 1},
		.eth = {.type = IBV_FLOW_SPEC_ETH,
			.size = sizeof(struct ibv_flow_spec_eth)},
		.tag = {.type = IBV_FLOW_SPEC_ACTION_TAG,
			.size = sizeof(struct ibv_flow_spec_action_tag),
			.tag_id = TAG},
	};
	size_t size = 65536 + FRAMES * BUFFER_SIZE;
	struct ibv_port_attr port;
	int i;

	memset(e, 0, sizeof(*e));
	e->ctx = open_device();
	OK(ibv_query_device_ex(e->ctx, NULL, &e->attr));
	OK(ibv_query_port(e->ctx, 1, &port));
	if (!e->attr.raw_packet_caps || port.link_layer != IBV_LINK_LAYER_ETHERNET)
		SKIP("no raw packets on this device");
	e->recv_ctx = open_device();
	e->pd = MUST(ibv_alloc_pd(e->ctx));
	e->recv_pd = MUST(ibv_alloc_pd(e->recv_ctx));
	e->sent = MUST(ibv_create_cq(e->ctx, 64, NULL, NULL, 0));
	e->got = MUST(ibv_create_cq_ex(e->recv_ctx, &init));
	e->buf = MUST(aligned_alloc(4096, size));
	memset(e->buf, 0, size);
	e->mr = MUST(ibv_reg_mr(e->pd, e->buf, size, IBV_ACCESS_LOCAL_WRITE));
	e->recv_mr = MUST(ibv_reg_mr(e->recv_pd, e->buf, size,
				     IBV_ACCESS_LOCAL_WRITE));
	e->send = create_packet_qp(e->pd, e->sent, 0, 128);
	e->recv = create_packet_qp(e->recv_pd, ibv_cq_ex_to_cq(e->got), create_flags, 0);
	for (i = 0; i < FRAMES; i++) {
		struct ibv_sge sge = {
			.addr = (uintptr_t)e->buf + 65536 + i * BUFFER_SIZE,
			.length = BUFFER_SIZE,
			.lkey = e->recv_mr->lkey,
		};
		struct ibv_recv_wr wr = {.wr_id = i, .sg_list = &sge,
					 .num_sge = 1}, *bad;

		OK(ibv_post_recv(e->recv, &wr, &bad));
	}
	memcpy(flow.eth.val.dst_mac, to, 6);
	memset(flow.eth.mask.dst_mac, 0xff, 6);
	e->flow = MUST(ibv_create_flow(e->recv, &flow.attr));
}

static void close_ends(struct ends *e)
{
	OK(ibv_destroy_flow(e->flow));
	OK(ibv_destroy_qp(e->recv));
	OK(ibv_destroy_qp(e->send));
	OK(ibv_dereg_mr(e->mr));
	OK(ibv_dereg_mr(e->recv_mr));
	OK(ibv_destroy_cq(ibv_cq_ex_to_cq(e->got)));
	OK(ibv_destroy_cq(e->sent));
	OK(ibv_dealloc_pd(e->pd));
	OK(ibv_dealloc_pd(e->recv_pd));
	OK(ibv_close_device(e->ctx));
	OK(ibv_close_device(e->recv_ctx));
	free(e->buf);
}

static uint16_t get16(const uint8_t *p)
{
	return p[0] << 8 | p[1];
}

static void put16(uint8_t *p, unsigned v)
{
	p[0] = v >> 8;
	p[1] = v;
}

/* Writes Ethernet, IPv4 and TCP headers, without checksums, for `data` bytes. */
static void write_headers(uint8_t *h, unsigned data)
{
	memset(h, 0, HEADERS);
	memcpy(h, to, 6);
	memcpy(h + 6, from, 6);
	put16(h + 12, 0x0800);
	h[14] = 0x45;
	put16(h + 16, 40 + data);
	put16(h + 18, 77);
	h[22] = 64;
	h[23] = 6;
	memcpy(h + 26, "\x0a\0\0\1\x0a\0\0\2", 8);
	put16(h + 34, 1000);
	put16(h + 36, 2000);
	put16(h + 40, 500); /* sequence number */
	h[46] = 0x50;
	h[47] = 0x18;
}

/* The one's complement sum of a range: 0xffff if its checksum is right. */
static unsigned sum(const uint8_t *p, size_t n, unsigned start)
{
	uint32_t s = start;
	size_t i;

	for (i = 0; i < n; i++)
		s += i & 1 ? p[i] : p[i] << 8;
	while (s >> 16)
		s = (s & 0xffff) + (s >> 16);
	return s;
}

static struct frame {
	uint64_t wr_id;
	uint32_t len, tag, flags;
	uint16_t vlan;
} next_frame(struct ends *e)
{
	struct ibv_poll_cq_attr attr = {};
	struct frame got;
	double until = now_ms() + 10000;

	while (ibv_start_poll(e->got, &attr))
		if (now_ms() > until)
			FAIL("no frame");
	EQ(e->got->status, IBV_WC_SUCCESS);
	EQ(ibv_wc_read_opcode(e->got), IBV_WC_RECV);
	got.wr_id = e->got->wr_id;
	got.len = ibv_wc_read_byte_len(e->got);
	got.tag = ibv_wc_read_flow_tag(e->got);
	got.vlan = ibv_wc_read_cvlan(e->got);
	got.flags = ibv_wc_read_wc_flags(e->got);
	ibv_end_poll(e->got);
	return got;
}

static uint8_t *frame_buffer(struct ends *e, uint64_t wr_id)
{
	return e->buf + 65536 + wr_id * BUFFER_SIZE;
}

static void check_sent(struct ends *e, uint64_t wr_id, enum ibv_wc_opcode opcode)
{
	struct ibv_wc wc = POLL(e->sent);

	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(wc.wr_id, wr_id);
	EQ(wc.opcode, opcode);
	EQ(wc.qp_num, e->send->qp_num);
}

static int post_tso(struct ends *e, uint64_t wr_id, const uint8_t *h,
		    unsigned hdr_sz, unsigned data, unsigned mss)
{
	struct ibv_sge list[2] = {
		{(uintptr_t)e->buf, data / 3, e->mr->lkey},
		{(uintptr_t)e->buf + data / 3, data - data / 3, e->mr->lkey},
	};
	struct ibv_send_wr wr = {.wr_id = wr_id, .sg_list = list, .num_sge = 2,
				 .opcode = IBV_WR_TSO,
				 .send_flags = IBV_SEND_SIGNALED |
					       IBV_SEND_IP_CSUM}, *bad;

	wr.tso.hdr = (void *)(uintptr_t)h;
	wr.tso.hdr_sz = hdr_sz;
	wr.tso.mss = mss;
	return ibv_post_send(e->send, &wr, &bad);
}

/* Receives the segments of a packet, which must have right headers and checksums. */
static void check_segments(struct ends *e, unsigned data, unsigned mss)
{
	unsigned at, part;

	for (at = 0; at < data; at += part) {
		struct frame got = next_frame(e);
		uint8_t *f = frame_buffer(e, got.wr_id);

		part = data - at < mss ? data - at : mss;
		EQ(got.len, HEADERS + part);
		EQ(got.tag, TAG);
		EQ(get16(f + 16), 40 + part);
		EQ(get16(f + 40), 500 + at);
		EQ(f[47], at + part == data ? 0x18 : 0x10);
		EQ(sum(f + 14, 20, 0), 0xffff);
		EQ(sum(f + 34, 20 + part, sum(f + 26, 8, 6 + 20 + part)), 0xffff);
		CHECK(!memcmp(f + HEADERS, e->buf + at, part));
	}
}

static void tso_post(void)
{
	struct ends e;
	uint8_t h[HEADERS];

	open_ends(&e, 0);
	CHECK(e.attr.tso_caps.supported_qpts & 1 << IBV_QPT_RAW_PACKET);
	CHECK(e.attr.tso_caps.max_tso >= 16384);
	pattern(e.buf, 4000, 1);
	write_headers(h, 4000);
	OK(post_tso(&e, 1, h, HEADERS, 4000, 900));
	memset(h, 0xff, sizeof(h)); /* the post has copied it */
	check_sent(&e, 1, IBV_WC_TSO);
	check_segments(&e, 4000, 900);
	write_headers(h, 10);
	OK(post_tso(&e, 2, h, HEADERS, 10, 900));
	check_sent(&e, 2, IBV_WC_TSO);
	check_segments(&e, 10, 900);
	close_ends(&e);
}

static void tso_wr(void)
{
	struct ends e;
	struct ibv_qp_ex *qp;
	uint8_t h[HEADERS];

	open_ends(&e, 0);
	qp = MUST(ibv_qp_to_qp_ex(e.send));
	pattern(e.buf, 3000, 2);
	ibv_wr_start(qp);
	qp->wr_id = 3;
	qp->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_IP_CSUM;
	write_headers(h, 3000);
	ibv_wr_send_tso(qp, h, HEADERS, 1000);
	memset(h, 0xff, sizeof(h)); /* the post has copied it */
	ibv_wr_set_sge(qp, e.mr->lkey, (uintptr_t)e.buf, 3000);
	qp->wr_id = 4;
	ibv_wr_send(qp);
	write_headers(e.buf + 32768, 6);
	ibv_wr_set_sge(qp, e.mr->lkey, (uintptr_t)e.buf + 32768, HEADERS + 6);
	OK(ibv_wr_complete(qp));
	check_sent(&e, 3, IBV_WC_TSO);
	check_sent(&e, 4, IBV_WC_SEND);
	check_segments(&e, 3000, 1000);
	EQ(next_frame(&e).len, HEADERS + 6);
	close_ends(&e);
}

static void tso_bad(void)
{
	struct ends e;
	uint8_t h[256];
	struct ibv_qp_init_attr_ex init = {};

	open_ends(&e, 0);
	write_headers(h, 100);
	EQ(post_tso(&e, 1, h, 13, 100, 50), EINVAL);
	EQ(post_tso(&e, 1, h, 200, 100, 50), EINVAL);
	if (e.attr.tso_caps.max_tso <= 65536)
		EQ(post_tso(&e, 1, h, HEADERS, e.attr.tso_caps.max_tso + 3, 50),
		   EINVAL);
	/* The queue pair still works. */
	pattern(e.buf, 100, 3);
	OK(post_tso(&e, 2, h, HEADERS, 100, 50));
	check_sent(&e, 2, IBV_WC_TSO);
	check_segments(&e, 100, 50);
	/* max_tso_header on a queue pair of another type. */
	init.send_cq = init.recv_cq = e.sent;
	init.cap.max_send_wr = init.cap.max_send_sge = 1;
	init.qp_type = IBV_QPT_RC;
	init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_MAX_TSO_HEADER;
	init.pd = e.pd;
	init.max_tso_header = 64;
	/* libmlx5 does not set errno. */
	CHECK(!ibv_create_qp_ex(e.ctx, &init));
	close_ends(&e);
}

static void send_tagged(struct ends *e)
{
	uint8_t h[HEADERS];
	struct ibv_sge sge = {(uintptr_t)e->buf, HEADERS + 4 + 30, e->mr->lkey};
	struct ibv_send_wr wr = {.wr_id = 9, .sg_list = &sge, .num_sge = 1,
				 .opcode = IBV_WR_SEND,
				 .send_flags = IBV_SEND_SIGNALED |
					       IBV_SEND_IP_CSUM}, *bad;

	write_headers(h, 30);
	memcpy(e->buf, h, 12);
	put16(e->buf + 12, 0x8100);
	put16(e->buf + 14, 0x6123);
	memcpy(e->buf + 16, h + 12, HEADERS - 12);
	pattern(e->buf + HEADERS + 4, 30, 4);
	OK(ibv_post_send(e->send, &wr, &bad));
	check_sent(e, 9, IBV_WC_SEND);
}

static void vlan(void)
{
	struct ends e;
	struct frame got;

	open_ends(&e, 0);
	send_tagged(&e);
	got = next_frame(&e);
	EQ(got.len, HEADERS + 4 + 30);
	EQ(got.vlan, 0);
	CHECK_PATTERN(frame_buffer(&e, got.wr_id) + HEADERS + 4, 30, 4);
	if (!(e.attr.raw_packet_caps & IBV_RAW_PACKET_CAP_CVLAN_STRIPPING))
		SKIP("no VLAN stripping");
	close_ends(&e);
	open_ends(&e, IBV_QP_CREATE_CVLAN_STRIPPING);
	send_tagged(&e);
	got = next_frame(&e);
	EQ(got.len, HEADERS + 30);
	EQ(got.vlan, 0x6123);
	EQ(got.tag, TAG);
	CHECK_PATTERN(frame_buffer(&e, got.wr_id) + HEADERS, 30, 4);
	close_ends(&e);
}

/* A queue pair of the sender's context, which receives with self loopback only. */
static void self_loopback(void)
{
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_eth eth;
	} init = {
		.attr = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(init),
			 .num_of_specs = 1, .port = 1},
		.eth = {.type = IBV_FLOW_SPEC_ETH,
			.size = sizeof(struct ibv_flow_spec_eth)},
	};
	struct ibv_send_wr send = {.num_sge = 1, .opcode = IBV_WR_SEND,
				   .send_flags = IBV_SEND_SIGNALED}, *bad_send;
	struct ibv_recv_wr recv = {.num_sge = 1}, *bad;
	struct ibv_sge sge, recv_sge;
	struct ibv_flow *flow;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_wc wc;
	struct ends e;
	int allowed;

	open_ends(&e, 0);
	memcpy(init.eth.val.dst_mac, to, 6);
	memset(init.eth.mask.dst_mac, 0xff, 6);
	init.eth.val.dst_mac[5] += 5;
	write_headers(e.buf, 30);
	e.buf[5] += 5;
	sge = (struct ibv_sge){(uintptr_t)e.buf, HEADERS + 30, e.mr->lkey};
	recv_sge = (struct ibv_sge){(uintptr_t)e.buf + 4096, BUFFER_SIZE, e.mr->lkey};
	send.sg_list = &sge;
	recv.sg_list = &recv_sge;
	for (allowed = 0; allowed < 2; allowed++) {
		cq = MUST(ibv_create_cq(e.ctx, 16, NULL, NULL, 0));
		qp = create_packet_qp_dv(
			e.pd, cq, 0, 0,
			allowed ? MLX5DV_QP_CREATE_TIR_ALLOW_SELF_LOOPBACK_UC :
				  0);
		OK(ibv_post_recv(qp, &recv, &bad));
		flow = MUST(ibv_create_flow(qp, &init.attr));
		OK(ibv_post_send(e.send, &send, &bad_send));
		check_sent(&e, 0, IBV_WC_SEND);
		EQ(poll_wait(cq, &wc, allowed ? 10000 : 300), allowed);
		if (allowed)
			EQ(wc.byte_len, HEADERS + 30);
		OK(ibv_destroy_flow(flow));
		OK(ibv_destroy_qp(qp));
		OK(ibv_destroy_cq(cq));
	}
	close_ends(&e);
}

static void checksums(void)
{
	struct ends e;
	struct ibv_sge sge;
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1,
				 .opcode = IBV_WR_SEND,
				 .send_flags = IBV_SEND_SIGNALED}, *bad;
	int valid;

	open_ends(&e, 0);
	for (valid = 0; valid < 2; valid++) {
		write_headers(e.buf, 30);
		sge = (struct ibv_sge){(uintptr_t)e.buf, HEADERS + 30,
				       e.mr->lkey};
		if (valid)
			wr.send_flags |= IBV_SEND_IP_CSUM;
		OK(ibv_post_send(e.send, &wr, &bad));
		check_sent(&e, 0, IBV_WC_SEND);
		EQ(!!(next_frame(&e).flags & IBV_WC_IP_CSUM_OK), valid);
	}
	close_ends(&e);
}

static void check_counters(uint64_t packets, uint64_t bytes,
			   struct ibv_counters *counters)
{
	uint64_t values[3] = {7, 7, 7};

	OK(ibv_read_counters(counters, values, 3, 0));
	EQ(values[0], bytes);
	EQ(values[1], 0);
	EQ(values[2], packets);
}

static void counters_with(bool uncounted)
{
	struct ends e;
	struct ibv_counters_init_attr init = {};
	struct ibv_counter_attach_attr point = {
		.counter_desc = IBV_COUNTER_PACKETS, .index = 2};
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_eth eth;
		/* The next specification, without padding for its alignment. */
		uint8_t count[sizeof(struct ibv_flow_spec_counter_action)];
	} flow = {
		.attr = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(flow),
			 .num_of_specs = 2, .port = 1},
		.eth = {.type = IBV_FLOW_SPEC_ETH,
			.size = sizeof(struct ibv_flow_spec_eth)},
	};
	struct ibv_flow_spec_counter_action count = {
		.type = IBV_FLOW_SPEC_ACTION_COUNT, .size = sizeof(count)};
	struct ibv_flow *first, *second;
	struct ibv_counters *c, *unused;
	uint64_t value;
	uint8_t h[HEADERS];
	int i;

	open_ends(&e, 0);
	memcpy(flow.eth.val.dst_mac, to, 6);
	memset(flow.eth.mask.dst_mac, 0xff, 6);
	flow.eth.val.dst_mac[5]++;
	c = MUST(ibv_create_counters(e.recv_ctx, &init));
	count.counters = c;
	memcpy(flow.count, &count, sizeof(count));
	if (uncounted) {
		NULL_WITH(ibv_create_flow(e.recv, &flow.attr), EINVAL);
		OK(ibv_destroy_counters(c));
		close_ends(&e);
		return;
	}
	CHECK(ibv_read_counters(c, &value, 1, 0));
	OK(ibv_attach_counters_point_flow(c, &point, NULL));
	point = (struct ibv_counter_attach_attr){
		.counter_desc = IBV_COUNTER_BYTES, .index = 0};
	OK(ibv_attach_counters_point_flow(c, &point, NULL));
	point.counter_desc = 2;
	CHECK(ibv_attach_counters_point_flow(c, &point, NULL));
	point.counter_desc = IBV_COUNTER_BYTES;
	CHECK(ibv_attach_counters_point_flow(c, &point, e.flow));
	first = MUST(ibv_create_flow(e.recv, &flow.attr));
	EQ(ibv_attach_counters_point_flow(c, &point, NULL), EBUSY);
	EQ(ibv_destroy_counters(c), EBUSY);
	check_counters(0, 0, c);
	pattern(e.buf, 1000, 5);
	write_headers(h, 1000);
	h[5]++;
	OK(post_tso(&e, 1, h, HEADERS, 1000, 500));
	check_sent(&e, 1, IBV_WC_TSO);
	for (i = 0; i < 2; i++)
		EQ(next_frame(&e).len, HEADERS + 500);
	check_counters(2, 2 * (HEADERS + 500), c);
	/* A second flow with the same counters. */
	flow.eth.val.dst_mac[5]++;
	second = MUST(ibv_create_flow(e.recv, &flow.attr));
	h[5]++;
	OK(post_tso(&e, 2, h, HEADERS, 100, 500));
	check_sent(&e, 2, IBV_WC_TSO);
	EQ(next_frame(&e).len, HEADERS + 100);
	check_counters(3, 2 * (HEADERS + 500) + HEADERS + 100, c);
	OK(ibv_destroy_flow(first));
	EQ(ibv_destroy_counters(c), EBUSY);
	OK(ibv_destroy_flow(second));
	OK(ibv_destroy_counters(c));
	unused = MUST(ibv_create_counters(e.recv_ctx, &init));
	OK(ibv_destroy_counters(unused));
	close_ends(&e);
}

static void counters(void)
{
	counters_with(false);
}

static void uncounted(void)
{
	counters_with(true);
}

/* Header fields in the layout of mlx5dv_flow_match_parameters. */
struct headers_match {
	size_t size;
	uint64_t bytes[64 / 8];
};

/*
 * Creates a matcher of destination addresses, and the value for the address whose
 * last byte is `add` higher than that of `to`.
 */
static struct mlx5dv_flow_matcher *match_destination(struct ends *e, uint8_t add,
						     struct headers_match *value)
{
	struct headers_match mask = {.size = sizeof(mask.bytes)};
	struct mlx5dv_flow_matcher_attr attr = {
		.type = IBV_FLOW_ATTR_NORMAL,
		.match_criteria_enable = 1,
		.match_mask = (void *)&mask,
	};

	*value = mask;
	/* The destination address is in the third and fourth word. */
	memset((uint8_t *)mask.bytes + 8, 0xff, 6);
	memcpy((uint8_t *)value->bytes + 8, to, 6);
	((uint8_t *)value->bytes)[13] += add;
	return MUST(mlx5dv_create_flow_matcher(e->recv_ctx, &attr));
}

/* A flow counter created by a DevX command, in a flow of mlx5dv. */
static void device_counter(void)
{
	struct ends e;
	uint8_t create[16] = {0x09, 0x39}, made[16] = {};
	uint8_t query[32] = {0x09, 0x3b}, answer[32] = {};
	struct mlx5dv_devx_obj *counter;
	struct headers_match value;
	struct mlx5dv_flow_action_attr actions[4] = {
		{.type = MLX5DV_FLOW_ACTION_DEST_IBV_QP},
		{.type = MLX5DV_FLOW_ACTION_COUNTERS_DEVX},
		{.type = MLX5DV_FLOW_ACTION_TAG, .tag_value = 77},
		{.type = MLX5DV_FLOW_ACTION_COUNTERS_DEVX},
	};
	struct mlx5dv_flow_matcher *matcher;
	struct ibv_flow *flow;
	struct frame got;
	uint8_t h[HEADERS];

	open_ends(&e, 0);
	counter = mlx5dv_devx_obj_create(e.recv_ctx, create, sizeof(create),
					 made, sizeof(made));
	if (!counter)
		SKIP("no DevX");
	matcher = match_destination(&e, 3, &value);
	actions[0].qp = e.recv;
	actions[1].obj = actions[3].obj = counter;
	NULL_WITH(mlx5dv_create_flow(matcher, (void *)&value, 4, actions),
		  EOPNOTSUPP);
	flow = MUST(mlx5dv_create_flow(matcher, (void *)&value, 3, actions));
	pattern(e.buf, 1000, 6);
	write_headers(h, 1000);
	h[5] += 3;
	OK(post_tso(&e, 1, h, HEADERS, 1000, 600));
	check_sent(&e, 1, IBV_WC_TSO);
	got = next_frame(&e);
	EQ(got.len, HEADERS + 600);
	EQ(got.tag, 77);
	EQ(next_frame(&e).len, HEADERS + 400);
	memcpy(query + 0x1c, made + 8, 4);
	OK(mlx5dv_devx_obj_query(counter, query, sizeof(query), answer,
				 sizeof(answer)));
	EQ(answer[0x17], 2);
	EQ(get16(answer + 0x1e), 2 * HEADERS + 1000);
	OK(ibv_destroy_flow(flow));
	OK(mlx5dv_destroy_flow_matcher(matcher));
	OK(mlx5dv_devx_obj_destroy(counter));
	close_ends(&e);
}

static uint64_t header_action(unsigned type, unsigned field, unsigned length,
			      uint32_t data)
{
	return htobe64((uint64_t)(type << 28 | field << 16 | length) << 32 | data);
}

/* A flow action that modifies headers of received packets. */
static void actions(void)
{
	struct ends e;
	uint64_t list[3] = {
		header_action(1, 0x5, 16, 0xbeef), /* the end of the address */
		header_action(2, 0xa, 0, -5u),	   /* the time to live */
		header_action(1, 0x9, 16, 443),	   /* the TCP port */
	};
	struct headers_match value;
	struct mlx5dv_flow_action_attr flow_actions[2] = {
		{.type = MLX5DV_FLOW_ACTION_IBV_FLOW_ACTION},
		{.type = MLX5DV_FLOW_ACTION_DEST_IBV_QP},
	};
	struct mlx5dv_flow_matcher *matcher;
	struct ibv_flow_action *action;
	struct ibv_flow *flow;
	struct frame got;
	uint8_t h[HEADERS], *f;

	open_ends(&e, 0);
	action = mlx5dv_create_flow_action_modify_header(
		e.recv_ctx, sizeof(list), list, MLX5DV_FLOW_TABLE_TYPE_NIC_RX);
	if (!action)
		SKIP("this device does not modify headers");
	NULL_WITH(mlx5dv_create_flow_action_packet_reformat(
			  e.recv_ctx, 8, NULL,
			  MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TUNNEL_TO_L2,
			  MLX5DV_FLOW_TABLE_TYPE_NIC_RX),
		  EINVAL);
	CHECK(!mlx5dv_create_flow_action_packet_reformat(
		e.recv_ctx, 0, NULL,
		MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TUNNEL_TO_L2,
		MLX5DV_FLOW_TABLE_TYPE_NIC_RX));
	matcher = match_destination(&e, 6, &value);
	flow_actions[0].action = action;
	flow_actions[1].qp = e.recv;
	flow = MUST(mlx5dv_create_flow(matcher, (void *)&value, 2, flow_actions));
	EQ(ibv_destroy_flow_action(action), EBUSY);
	pattern(e.buf, 100, 8);
	write_headers(h, 100);
	h[5] += 6;
	OK(post_tso(&e, 1, h, HEADERS, 100, 600));
	check_sent(&e, 1, IBV_WC_TSO);
	got = next_frame(&e);
	f = frame_buffer(&e, got.wr_id);
	EQ(got.len, HEADERS + 100);
	CHECK(!memcmp(f, to, 4));
	EQ(get16(f + 4), 0xbeef);
	EQ(f[22], 64 - 5);
	EQ(get16(f + 36), 443);
	EQ(sum(f + 14, 20, 0), 0xffff);
	EQ(sum(f + 34, 120, sum(f + 26, 8, 6 + 120)), 0xffff);
	OK(ibv_destroy_flow(flow));
	OK(ibv_destroy_flow_action(action));
	OK(mlx5dv_destroy_flow_matcher(matcher));
	close_ends(&e);
}

#define STRIDE 256
#define STRIDES 512

/* Waits for the next CQE of a queue that the program reads directly. */
static struct mlx5_cqe64 *next_cqe(struct mlx5dv_cq *cq, unsigned n)
{
	struct mlx5_cqe64 *cqe = (void *)((uint8_t *)cq->buf +
					  (n & (cq->cqe_cnt - 1)) * cq->cqe_size);
	double until = now_ms() + 10000;

	while (mlx5dv_get_cqe_opcode(cqe) == MLX5_CQE_INVALID ||
	       (mlx5dv_get_cqe_owner(cqe) != !!(n & cq->cqe_cnt)))
		if (now_ms() > until)
			FAIL("no completion %u", n);
	return cqe;
}

/* A striding receive queue, on which the program posts and polls directly. */
static void strides(void)
{
	struct ends e;
	struct ibv_wq_init_attr init = {.wq_type = IBV_WQT_RQ, .max_wr = 2,
					.max_sge = 1};
	struct mlx5dv_wq_init_attr dv_init = {
		.comp_mask = MLX5DV_WQ_INIT_ATTR_MASK_STRIDING_RQ,
		.striding_rq_attrs = {.single_stride_log_num_of_bytes = 8,
				      .single_wqe_log_num_of_strides = 9,
				      .two_byte_shift_en = 1},
	};
	struct mlx5dv_context caps = {.comp_mask =
					      MLX5DV_CONTEXT_MASK_STRIDING_RQ};
	struct ibv_rwq_ind_table_init_attr table_init = {};
	static uint8_t key[40] = {1};
	struct ibv_qp_init_attr_ex qp_init = {
		.qp_type = IBV_QPT_RAW_PACKET,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_IND_TABLE |
			     IBV_QP_INIT_ATTR_RX_HASH,
		.rx_hash_conf = {.rx_hash_function = IBV_RX_HASH_FUNC_TOEPLITZ,
				 .rx_hash_key_len = sizeof(key),
				 .rx_hash_key = key},
	};
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_eth eth;
	} flow_init = {
		.attr = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(flow_init),
			 .num_of_specs = 1, .port = 1},
		.eth = {.type = IBV_FLOW_SPEC_ETH,
			.size = sizeof(struct ibv_flow_spec_eth)},
	};
	struct ibv_wq_attr ready = {.attr_mask = IBV_WQ_ATTR_STATE,
				    .wq_state = IBV_WQS_RDY};
	size_t size = 2 * STRIDE * STRIDES;
	struct mlx5dv_rwq rwq;
	struct mlx5dv_cq dv_cq;
	struct mlx5dv_obj obj;
	struct ibv_rwq_ind_table *table;
	struct ibv_flow *flow;
	struct ibv_cq *cq;
	struct ibv_wq *wq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	uint8_t *buf, h[HEADERS];
	unsigned used = 0, wqe = 0, n = 0, round, at;

	open_ends(&e, 0);
	OK(mlx5dv_query_device(e.recv_ctx, &caps));
	printf("strides: %u %u %u %u %#x\n",
	       caps.striding_rq_caps.min_single_stride_log_num_of_bytes,
	       caps.striding_rq_caps.max_single_stride_log_num_of_bytes,
	       caps.striding_rq_caps.min_single_wqe_log_num_of_strides,
	       caps.striding_rq_caps.max_single_wqe_log_num_of_strides,
	       caps.striding_rq_caps.supported_qpts);
	if (!caps.striding_rq_caps.supported_qpts)
		SKIP("no striding receive queues");
	cq = MUST(ibv_create_cq(e.recv_ctx, 256, NULL, NULL, 0));
	init.pd = e.recv_pd;
	init.cq = cq;
	dv_init.striding_rq_attrs.single_stride_log_num_of_bytes = 5;
	CHECK(!mlx5dv_create_wq(e.recv_ctx, &init, &dv_init));
	dv_init.striding_rq_attrs.single_stride_log_num_of_bytes = 8;
	dv_init.striding_rq_attrs.single_wqe_log_num_of_strides = 17;
	CHECK(!mlx5dv_create_wq(e.recv_ctx, &init, &dv_init));
	dv_init.striding_rq_attrs.single_wqe_log_num_of_strides = 9;
	wq = MUST(mlx5dv_create_wq(e.recv_ctx, &init, &dv_init));
	table_init.ind_tbl = &wq;
	table = MUST(ibv_create_rwq_ind_table(e.recv_ctx, &table_init));
	qp_init.pd = e.recv_pd;
	qp_init.rwq_ind_tbl = table;
	qp = MUST(ibv_create_qp_ex(e.recv_ctx, &qp_init));
	memcpy(flow_init.eth.val.dst_mac, to, 6);
	memset(flow_init.eth.mask.dst_mac, 0xff, 6);
	flow_init.eth.val.dst_mac[5] += 4;
	flow = MUST(ibv_create_flow(qp, &flow_init.attr));
	OK(ibv_modify_wq(wq, &ready));
	obj.rwq.in = wq;
	obj.rwq.out = &rwq;
	obj.cq.in = cq;
	obj.cq.out = &dv_cq;
	rwq.comp_mask = dv_cq.comp_mask = 0;
	OK(mlx5dv_init_obj(&obj, MLX5DV_OBJ_RWQ | MLX5DV_OBJ_CQ));
	EQ(rwq.stride, 32);
	buf = MUST(aligned_alloc(4096, size));
	memset(buf, 0xee, size);
	mr = MUST(ibv_reg_mr(e.recv_pd, buf, size, IBV_ACCESS_LOCAL_WRITE));
	for (at = 0; at < 2; at++) {
		struct mlx5_wqe_data_seg *segment =
			(void *)((uint8_t *)rwq.buf + at * rwq.stride + 16);

		memset(segment - 1, 0, 16);
		mlx5dv_set_data_seg(segment, size / 2, mr->lkey,
				    (uintptr_t)buf + at * (size / 2));
	}
	__atomic_thread_fence(__ATOMIC_RELEASE);
	*(volatile __be32 *)rwq.dbrec = htobe32(2);

	for (round = 0; round < 2; round++) {
		const unsigned data = 43 * 1440, mss = 1440;
		const unsigned each = (2 + HEADERS + 1440 + STRIDE - 1) / STRIDE;

		pattern(e.buf, data, 7 + round);
		write_headers(h, 0);
		h[5] += 4;
		OK(post_tso(&e, round, h, HEADERS, data, mss));
		check_sent(&e, round, IBV_WC_TSO);
		for (at = 0; at < data; at += mss) {
			struct mlx5_cqe64 *cqe = next_cqe(&dv_cq, n++);
			uint32_t count = be32toh(cqe->byte_cnt);
			uint8_t *frame;

			if (used + each > STRIDES) {
				EQ(count, 1u << 31 | (STRIDES - used) << 16);
				EQ(be16toh(cqe->wqe_id), wqe);
				EQ(be16toh(cqe->wqe_counter), used);
				wqe++;
				used = 0;
				cqe = next_cqe(&dv_cq, n++);
				count = be32toh(cqe->byte_cnt);
			}
			EQ(mlx5dv_get_cqe_opcode(cqe), MLX5_CQE_RESP_SEND);
			EQ(count, each << 16 | (HEADERS + mss));
			EQ(be16toh(cqe->wqe_id), wqe);
			EQ(be16toh(cqe->wqe_counter), used);
			frame = buf + wqe * (size / 2) + used * STRIDE + 2;
			CHECK(!memcmp(frame + HEADERS, e.buf + at, mss));
			used += each;
			dv_cq.dbrec[0] = htobe32(n & 0xffffff);
		}
	}
	EQ(wqe, 1);
	OK(ibv_destroy_flow(flow));
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_rwq_ind_table(table));
	OK(ibv_destroy_wq(wq));
	OK(ibv_destroy_cq(cq));
	OK(ibv_dereg_mr(mr));
	free(buf);
	close_ends(&e);
}

/* Device memory: that of MEMIC, and unsupported types. */
static void device_memory(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_pd *pd = MUST(ibv_alloc_pd(ctx));
	struct ibv_alloc_dm_attr size = {.length = 64};
	struct mlx5dv_alloc_dm_attr attr = {.type = MLX5DV_DM_TYPE_MEMIC};
	struct ibv_dm *dm = MUST(mlx5dv_alloc_dm(ctx, &size, &attr));
	uint64_t word = 0x1122334455667788, back = 0;

	OK(ibv_memcpy_to_dm(dm, 8, &word, 8));
	OK(ibv_memcpy_from_dm(&back, dm, 8, 8));
	EQ(back, word);
	OK(ibv_free_dm(dm));
	attr.comp_mask = 1;
	NULL_WITH(mlx5dv_alloc_dm(ctx, &size, &attr), EINVAL);
	attr.comp_mask = 0;
	attr.type = 99;
	NULL_WITH(mlx5dv_alloc_dm(ctx, &size, &attr), EOPNOTSUPP);
	attr.type = MLX5DV_DM_TYPE_STEERING_SW_ICM;
	CHECK(!mlx5dv_alloc_dm(ctx, &size, &attr));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
}

/* Steering anchors: flow tables that lead to those of the driver. */
static void anchors(void)
{
	struct ibv_context *ctx = open_device();
	struct mlx5dv_steering_anchor_attr attr = {
		.ft_type = MLX5DV_FLOW_TABLE_TYPE_NIC_RX,
	};
	struct mlx5dv_steering_anchor *first, *second;

	first = mlx5dv_create_steering_anchor(ctx, &attr);
	/* Linux offers them on devices that share objects with programs. */
	if (!first && errno == EPROTONOSUPPORT)
		SKIP("no steering anchors");
	CHECK(first && first->id != 0);
	attr.priority = 1;
	second = MUST(mlx5dv_create_steering_anchor(ctx, &attr));
	CHECK(second->id != 0 && second->id != first->id);
	attr.comp_mask = 1;
	NULL_WITH(mlx5dv_create_steering_anchor(ctx, &attr), EOPNOTSUPP);
	attr.comp_mask = 0;
	attr.ft_type = 99;
	NULL_WITH(mlx5dv_create_steering_anchor(ctx, &attr), EINVAL);
	OK(mlx5dv_destroy_steering_anchor(second));
	OK(mlx5dv_destroy_steering_anchor(first));
	OK(ibv_close_device(ctx));
}

int main(int argc, char **argv)
{
	static const struct test_case cases[] = {
		{"tso-post", tso_post}, {"tso-wr", tso_wr},
		{"tso-bad", tso_bad},	{"vlan", vlan},
		{"checksums", checksums}, {"self-loopback", self_loopback}, {"counters", counters},
		{"uncounted", uncounted},
		{"device-counter", device_counter},
		{"memory", device_memory},
		{"strides", strides},
		{"actions", actions},
		{"anchors", anchors},
	};

	return test_main(argc, argv, cases, ARRAY_SIZE(cases), 60);
}

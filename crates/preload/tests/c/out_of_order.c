/*
 * Queue pairs whose receives are consumed in any order (MLX5DV_QP_CREATE_OOO_DP, rdma-core
 * 55): messages complete in their order, receives not in that of posting. It says "well" if
 * all was as it should be.
 */
#include <fcntl.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"
#include "loopback.h"

#define OUT_OF_ORDER (1 << 7)
#define MASK (1 << 16)
#define RECEIVES 16
#define ROUNDS 400
#define SIZE 128
/* Of a receive: with the header of a datagram. */
#define GRH 40
#define ROOM 192
#define QKEY 0x111

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct ibv_ah *ah;
static unsigned char memory[(1 + RECEIVES) * ROOM] __attribute__((aligned(4096)));

/* struct mlx5dv_context as of rdma-core 55. */
union answer {
	struct mlx5dv_context known;
	struct {
		unsigned char before[176];
		uint32_t max_rc, max_xrc, max_dct, max_ud, max_uc;
	} later;
};

static struct ibv_qp *create(enum ibv_qp_type type, uint32_t receives, struct ibv_srq *srq,
			     uint32_t flags)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = type,
		.comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd,
		.cap = { .max_send_wr = RECEIVES, .max_send_sge = 1,
			 .max_recv_wr = receives, .max_recv_sge = 1 },
	};
	struct mlx5dv_qp_init_attr own = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS,
		.create_flags = flags,
	};

	errno = 0;
	return mlx5dv_create_qp(context, &init, &own);
}

static struct ibv_wc next(void)
{
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;
	int count;

	while (!(count = ibv_poll_cq(cq, 1, &wc)))
		CHECK(time(NULL) < end);
	CHECK(count == 1);
	return wc;
}

static unsigned char *of_receive(uint64_t wr_id)
{
	CHECK(wr_id < RECEIVES);
	return memory + (1 + wr_id) * ROOM;
}

static int receive(struct ibv_qp *qp, struct ibv_srq *srq, uint64_t wr_id)
{
	struct ibv_sge sge = { (uintptr_t)of_receive(wr_id), ROOM, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 }, *bad;

	return srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad);
}

/* To the queue pair that it is connected to, or of that number, or to a shared queue. */
static void sends(struct ibv_qp *qp, uint32_t to, uint32_t number, uint32_t length)
{
	struct ibv_sge sge = { (uintptr_t)memory, length, mr->lkey };
	struct ibv_send_wr *bad, wr = {
		.wr_id = 1000, .sg_list = &sge, .num_sge = 1, .imm_data = number,
		.opcode = IBV_WR_SEND_WITH_IMM, .send_flags = IBV_SEND_SIGNALED,
	};

	if (qp->qp_type == IBV_QPT_UD) {
		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = to;
		wr.wr.ud.remote_qkey = QKEY;
	} else if (qp->qp_type == IBV_QPT_XRC_SEND) {
		wr.qp_type.xrc.remote_srqn = to;
	}
	CHECK(!ibv_post_send(qp, &wr, &bad));
}

/* Receives `count` messages, numbered from `first`; how many were out of order. */
static int received(uint32_t first, int count, uint32_t length, uint32_t header,
		    uint64_t *order)
{
	int sent = 0, got = 0, unordered = 0;

	while (sent < count || got < count) {
		struct ibv_wc wc = next();

		CHECK(wc.status == IBV_WC_SUCCESS);
		if (wc.wr_id == 1000) {
			sent++;
			continue;
		}
		CHECK(wc.opcode == IBV_WC_RECV && wc.byte_len == header + length);
		CHECK(wc.imm_data == first + got);
		CHECK(!memcmp(of_receive(wc.wr_id) + header, memory, length));
		memset(of_receive(wc.wr_id), 0, ROOM);
		/* `order` are those that were posted, from the oldest on. */
		unordered += order && order[got] != wc.wr_id;
		if (order)
			order[RECEIVES + got] = wc.wr_id;
		got++;
	}
	return unordered;
}

static const struct ibv_qp_attr connection = {
	.qp_access_flags = IBV_ACCESS_LOCAL_WRITE, .timeout = 14, .retry_cnt = 7,
	.rnr_retry = 7, .min_rnr_timer = 12, .qkey = QKEY,
};

/* Rounds of 1 to RECEIVES messages, of lengths that fit into a CQE and not. */
static void rounds(struct ibv_qp *qp)
{
	/* The receives, from the oldest on; behind them those that have completed. */
	uint64_t order[2 * RECEIVES];
	uint32_t number = 0, header = qp->qp_type == IBV_QPT_UD ? GRH : 0;
	int unordered = 0;

	for (int i = 0; i < RECEIVES; i++) {
		CHECK(!receive(qp, NULL, i));
		order[i] = i;
	}
	CHECK(receive(qp, NULL, 0) == ENOMEM);
	for (int round = 0; round < ROUNDS; round++) {
		int count = 1 + (round * 7) % RECEIVES;
		uint32_t length = round % 3 ? SIZE : 24;

		for (uint32_t at = 0; at < length; at++)
			memory[at] = round + at;
		for (int i = 0; i < count; i++)
			sends(qp, qp->qp_num, number + i, length);
		unordered += received(number, count, length, header, order);
		number += count;
		/* What has completed is posted again, in the order of completion. */
		for (int i = 0; i < count; i++) {
			uint64_t wr_id = order[RECEIVES + i];
			int at = 0;

			while (order[at] != wr_id)
				CHECK(++at < RECEIVES);
			memmove(order + at, order + at + 1,
				(RECEIVES - 1 - at) * sizeof(order[0]));
			order[RECEIVES - 1] = wr_id;
			CHECK(!receive(qp, NULL, wr_id));
		}
		CHECK(receive(qp, NULL, 0) == ENOMEM);
	}
	/* They really were not those of posting. */
	CHECK(unordered > ROUNDS);
}

/* Each receive that is left returns once. */
static void flushed(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	unsigned seen = 0;

	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	for (int i = 0; i < RECEIVES; i++) {
		struct ibv_wc wc = next();

		CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id < RECEIVES);
		CHECK(!(seen & 1 << wc.wr_id));
		seen |= 1 << wc.wr_id;
	}
}

static void own_queue(enum ibv_qp_type type)
{
	struct ibv_qp_attr attr = connection;
	struct ibv_qp_init_attr init;
	struct ibv_qp *qp = create(type, RECEIVES, NULL, OUT_OF_ORDER);

	CHECK(qp);
	CHECK(!ibv_query_qp(qp, &attr, IBV_QP_CAP, &init));
	CHECK(init.cap.max_recv_wr == RECEIVES);
	attr = connection;
	connect_to_itself(qp, attr);
	rounds(qp);
	flushed(qp);
	/* Again, after a reset. */
	attr.qp_state = IBV_QPS_RESET;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	connect_to_itself(qp, connection);
	rounds(qp);
	CHECK(!ibv_destroy_qp(qp));
}

/* Fills a shared queue, and sends as many messages to it. */
static void through(struct ibv_srq *srq, struct ibv_qp *qp, uint32_t to)
{
	for (int i = 0; i < RECEIVES; i++)
		CHECK(!receive(NULL, srq, i));
	for (int i = 0; i < RECEIVES; i++)
		sends(qp, to, i, SIZE);
	received(0, RECEIVES, SIZE, qp->qp_type == IBV_QPT_UD ? GRH : 0, NULL);
}

static void shared_queue(enum ibv_qp_type type)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = RECEIVES, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &init);
	struct ibv_qp *qp;

	CHECK(srq);
	qp = create(type, 0, srq, OUT_OF_ORDER);
	CHECK(qp);
	connect_to_itself(qp, connection);
	through(srq, qp, qp->qp_num);
	CHECK(!ibv_destroy_qp(qp));
	CHECK(!ibv_destroy_srq(srq));
}

static void xrc(void)
{
	struct ibv_xrcd_init_attr domain = {
		.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
		.fd = -1, .oflags = O_CREAT,
	};
	struct ibv_xrcd *xrcd = ibv_open_xrcd(context, &domain);
	struct ibv_srq_init_attr_ex shared = {
		.attr = { .max_wr = RECEIVES, .max_sge = 1 }, .srq_type = IBV_SRQT_XRC,
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
			     IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
		.pd = pd, .xrcd = xrcd, .cq = cq,
	};
	struct ibv_srq *srq = ibv_create_srq_ex(context, &shared);
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = xrcd,
	};
	struct mlx5dv_qp_init_attr own = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS,
		.create_flags = OUT_OF_ORDER,
	};
	struct ibv_qp *target = mlx5dv_create_qp(context, &init, &own);
	struct ibv_qp *initiator = create(IBV_QPT_XRC_SEND, 0, NULL, OUT_OF_ORDER);
	uint32_t number;

	CHECK(xrcd && srq && target && initiator);
	CHECK(!ibv_get_srq_num(srq, &number));
	connect_to(target, initiator->qp_num, connection);
	connect_to(initiator, target->qp_num, connection);
	through(srq, initiator, number);
	CHECK(!ibv_destroy_qp(initiator) && !ibv_destroy_qp(target));
	CHECK(!ibv_destroy_srq(srq) && !ibv_close_xrcd(xrcd));
}

static void target(void)
{
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = RECEIVES, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(pd, &shared);
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = IBV_QPT_DRIVER,
		.comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd,
	};
	struct mlx5dv_qp_init_attr own = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC |
			     MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS,
		.create_flags = OUT_OF_ORDER,
		.dc_init_attr = { .dc_type = MLX5DV_DCTYPE_DCT, .dct_access_key = 1 },
	};
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .path_mtu = IBV_MTU_1024,
		.min_rnr_timer = 12, .ah_attr = { .port_num = 1, .is_global = 1 },
	};
	struct ibv_qp *qp;

	CHECK(srq);
	qp = mlx5dv_create_qp(context, &init, &own);
	CHECK(qp);
	CHECK(!ibv_query_gid(context, 1, 0, &attr.ah_attr.grh.dgid));
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
						IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
						IBV_QP_MIN_RNR_TIMER));
	CHECK(qp->qp_num);
	CHECK(!ibv_destroy_qp(qp));
	CHECK(!ibv_destroy_srq(srq));
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	union answer caps = { .known = { .comp_mask = MASK } };
	struct ibv_ah_attr here = { .port_num = 1, .is_global = 1 };
	struct ibv_device_attr device;
	struct ibv_port_attr port;
	struct ibv_qp *qp;

	CHECK(list && list[0]);
	context = ibv_open_device(list[0]);
	CHECK(context && !ibv_query_device(context, &device));
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 4 * RECEIVES, NULL, NULL, 0);
	CHECK(pd && cq);
	mr = ibv_reg_mr(pd, memory, sizeof(memory), IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr);

	CHECK(!mlx5dv_query_device(context, &caps.known));
	CHECK(caps.known.comp_mask == MASK);
	/* Of the shortest WQEs, unlike the device's max_qp_wr. */
	CHECK(caps.later.max_rc == 2 * (uint32_t)device.max_qp_wr);
	CHECK(caps.later.max_uc == caps.later.max_rc && caps.later.max_ud == caps.later.max_rc);
	CHECK(caps.later.max_xrc == 2 * caps.later.max_rc);
	CHECK(caps.later.max_dct == caps.later.max_xrc);

	qp = create(IBV_QPT_RC, caps.later.max_rc, NULL, OUT_OF_ORDER);
	CHECK(qp && !ibv_destroy_qp(qp));
	CHECK(!create(IBV_QPT_RC, caps.later.max_rc + 1, NULL, OUT_OF_ORDER));
	CHECK(errno == EINVAL);
	CHECK(!create(IBV_QPT_RAW_PACKET, RECEIVES, NULL, OUT_OF_ORDER));
	CHECK(errno == EOPNOTSUPP);
	CHECK(!create(IBV_QPT_RC, RECEIVES, NULL, OUT_OF_ORDER << 1));
	/* EINVAL from libmlx5. */
	CHECK(errno == EOPNOTSUPP || errno == EINVAL);

	CHECK(!ibv_query_gid(context, 1, 0, &here.grh.dgid) && !ibv_query_port(context, 1, &port));
	here.dlid = port.lid;
	ah = ibv_create_ah(pd, &here);
	CHECK(ah);
	own_queue(IBV_QPT_RC);
	own_queue(IBV_QPT_UC);
	own_queue(IBV_QPT_UD);
	shared_queue(IBV_QPT_RC);
	shared_queue(IBV_QPT_UD);
	xrc();
	target();

	CHECK(!ibv_destroy_ah(ah));
	CHECK(!ibv_dereg_mr(mr));
	CHECK(!ibv_destroy_cq(cq));
	CHECK(!ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	ibv_free_device_list(list);
	puts("well");
	return 0;
}

/*
 * Tag matching: a queue pair sends messages with tags to another one, whose shared
 * receive queue has a list of tags. It says "well" if all was as it should be.
 */
#include <endian.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/tm_types.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"

#define TAGS 4
#define RECEIVES 64
#define ROOM 256
#define MASK 0xffff

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static unsigned char *memory;
static struct ibv_cq *sent;
static struct ibv_cq_ex *received;
static struct ibv_srq *srq;
static uint32_t unexpected;

/* Parts of the memory. */
static unsigned char *message(void)
{
	return memory;
}
static unsigned char *of_tag(int which)
{
	return memory + (1 + which) * ROOM;
}
static unsigned char *of_receive(uint64_t wr_id)
{
	return memory + (16 + wr_id) * ROOM;
}

static struct ibv_sge sge(void *at, uint32_t length)
{
	return (struct ibv_sge){ (uintptr_t)at, length, mr->lkey };
}

/* What a completion said. */
struct told {
	uint64_t wr_id, tag;
	uint32_t status, opcode, flags, bytes, priv;
};

static struct told next(void)
{
	struct ibv_poll_cq_attr attr = {};
	struct ibv_wc_tm_info info;
	time_t end = time(NULL) + 60;
	struct told told;
	int err;

	while ((err = ibv_start_poll(received, &attr)) == ENOENT)
		CHECK(time(NULL) < end);
	CHECK(!err);
	told.wr_id = received->wr_id;
	told.status = received->status;
	told.opcode = told.status ? 0 : ibv_wc_read_opcode(received);
	told.flags = ibv_wc_read_wc_flags(received);
	told.bytes = ibv_wc_read_byte_len(received);
	ibv_wc_read_tm_info(received, &info);
	told.tag = info.tag;
	told.priv = info.priv;
	ibv_end_poll(received);
	return told;
}

static void none(void)
{
	struct ibv_poll_cq_attr attr = {};

	CHECK(ibv_start_poll(received, &attr) == ENOENT);
}

static void expect(uint64_t wr_id, uint32_t opcode, uint32_t flags)
{
	struct told told = next();

	if (told.status || told.wr_id != wr_id || told.opcode != opcode ||
	    told.flags != flags) {
		fprintf(stderr, "status %u id %lu opcode %u flags %u, not id %lu "
				"opcode %u flags %u\n",
			told.status, told.wr_id, told.opcode, told.flags, wr_id,
			opcode, flags);
		_exit(1);
	}
}

/* ---- changes of the list ---- */

static struct ibv_ops_wr adding(uint64_t wr_id, uint64_t tag, struct ibv_sge *to)
{
	return (struct ibv_ops_wr){
		.wr_id = wr_id,
		.opcode = IBV_WR_TAG_ADD,
		.flags = IBV_OPS_SIGNALED | IBV_OPS_TM_SYNC,
		.tm = { .unexpected_cnt = unexpected,
			.add = { .recv_wr_id = wr_id + 1000, .sg_list = to,
				 .num_sge = !!to, .tag = tag, .mask = MASK } },
	};
}

static uint32_t add(uint64_t wr_id, uint64_t tag, int which)
{
	struct ibv_sge to = sge(of_tag(which), ROOM);
	struct ibv_ops_wr *bad, wr = adding(wr_id, tag, &to);

	CHECK(!ibv_post_srq_ops(srq, &wr, &bad));
	expect(wr_id, IBV_WC_TM_ADD, 0);
	return wr.tm.handle;
}

static struct ibv_ops_wr removing(uint64_t wr_id, uint32_t handle)
{
	return (struct ibv_ops_wr){ .wr_id = wr_id,
				    .opcode = IBV_WR_TAG_DEL,
				    .flags = IBV_OPS_SIGNALED,
				    .tm.handle = handle };
}

static void synchronize(void)
{
	struct ibv_ops_wr *bad, wr = {
		.wr_id = 27,
		.opcode = IBV_WR_TAG_SYNC,
		.flags = IBV_OPS_SIGNALED | IBV_OPS_TM_SYNC,
		.tm.unexpected_cnt = unexpected,
	};

	CHECK(!ibv_post_srq_ops(srq, &wr, &bad));
	expect(27, IBV_WC_TM_SYNC, 0);
}

/* ---- messages ---- */

static void make_message(uint8_t opcode, uint64_t tag, uint32_t length)
{
	struct ibv_tmh header = { .opcode = opcode, .app_ctx = htobe32(0xabcd),
				  .tag = htobe64(tag) };

	for (uint32_t i = 0; i < length; i++)
		message()[i] = i + tag;
	memcpy(message(), &header, sizeof(header));
}

static void wait_sent(void)
{
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;

	while (ibv_poll_cq(sent, 1, &wc) != 1)
		CHECK(time(NULL) < end);
	CHECK(wc.status == IBV_WC_SUCCESS);
}

static void send_message(struct ibv_qp *qp, uint8_t opcode, uint64_t tag,
			 uint32_t length)
{
	struct ibv_sge data = sge(message(), length);
	struct ibv_send_wr *bad, wr = { .sg_list = &data, .num_sge = 1,
					.opcode = IBV_WR_SEND,
					.send_flags = IBV_SEND_SIGNALED };

	make_message(opcode, tag, length);
	CHECK(!ibv_post_send(qp, &wr, &bad));
	wait_sent();
}

/* The message came into the memory of a tag, without its header. By a dynamic connection it
 * has a global route. */
static void matched(uint64_t wr_id, int which, uint64_t tag, uint32_t length)
{
	struct told told = next();

	CHECK(!told.status && told.wr_id == wr_id + 1000);
	CHECK(told.opcode == IBV_WC_TM_RECV);
	CHECK((told.flags & ~IBV_WC_GRH) == (IBV_WC_TM_MATCH | IBV_WC_TM_DATA_VALID));
	CHECK(told.tag == tag && told.priv == 0xabcd);
	CHECK(told.bytes == length - sizeof(struct ibv_tmh));
	CHECK(!memcmp(of_tag(which), message() + sizeof(struct ibv_tmh),
		      length - sizeof(struct ibv_tmh)));
}

/* It took a receive, with its header. */
static void not_matched(uint32_t opcode, uint32_t length)
{
	struct told told = next();

	CHECK(!told.status && told.opcode == opcode);
	CHECK(!(told.flags & ~IBV_WC_GRH));
	CHECK(told.wr_id < RECEIVES && told.bytes == length);
	CHECK(!memcmp(of_receive(told.wr_id), message(), length));
	if (opcode == IBV_WC_TM_RECV)
		unexpected++;
}

/* ---- */

static void connect_to(struct ibv_qp *qp, uint32_t number)
{
	struct ibv_port_attr port;
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = number,
		.max_dest_rd_atomic = 1,
		.max_rd_atomic = 1,
		.min_rnr_timer = 12,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = 7,
	};

	CHECK(!ibv_query_port(context, 1, &port));
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.dlid = port.lid;
	attr.ah_attr.is_global = 1;
	CHECK(!ibv_query_gid(context, 1, 0, &attr.ah_attr.grh.dgid));
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
					IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
					IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					IBV_QP_MAX_QP_RD_ATOMIC));
}

static void create_queues(void)
{
	struct ibv_cq_init_attr_ex cq = { .cqe = 200,
					  .wc_flags = IBV_WC_STANDARD_FLAGS |
						      IBV_WC_EX_WITH_TM_INFO };
	struct ibv_srq_init_attr_ex init = {
		.attr = { .max_wr = RECEIVES, .max_sge = 1 },
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
			     IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM,
		.srq_type = IBV_SRQT_TM,
		.pd = pd,
		.tm_cap = { .max_num_tags = TAGS, .max_ops = 16 },
	};
	struct ibv_device_attr_ex caps;
	struct ibv_srq_attr size;
	uint32_t number;

	CHECK(!ibv_query_device_ex(context, NULL, &caps));
	CHECK(caps.tm_caps.flags & IBV_TM_CAP_RC);
	CHECK(caps.tm_caps.max_num_tags >= TAGS && caps.tm_caps.max_ops >= 16);
	CHECK(caps.tm_caps.max_sge >= 1 && caps.tm_caps.max_rndv_hdr_size >= 32);
	CHECK((sent = ibv_create_cq(context, 50, NULL, NULL, 0)));
	CHECK((received = ibv_create_cq_ex(context, &cq)));
	/* Its completions have more than ibv_poll_cq could say. */
	init.cq = sent;
	errno = 0;
	CHECK(!ibv_create_srq_ex(context, &init) && errno == EINVAL);
	init.cq = ibv_cq_ex_to_cq(received);
	init.comp_mask &= ~IBV_SRQ_INIT_ATTR_TM;
	CHECK(!ibv_create_srq_ex(context, &init) && errno == EINVAL);
	init.comp_mask |= IBV_SRQ_INIT_ATTR_TM;
	CHECK((srq = ibv_create_srq_ex(context, &init)));
	CHECK(init.attr.max_wr >= RECEIVES && init.attr.max_sge >= 1);
	CHECK(!ibv_get_srq_num(srq, &number) && number);
	CHECK(!ibv_query_srq(srq, &size) && size.max_wr >= RECEIVES);
	for (uint64_t i = 0; i < RECEIVES; i++) {
		struct ibv_sge to = sge(of_receive(i), ROOM);
		struct ibv_recv_wr *bad, wr = { .wr_id = i, .sg_list = &to,
						.num_sge = 1 };

		CHECK(!ibv_post_srq_recv(srq, &wr, &bad));
	}
}

/* A shared receive queue of another type has no tags. */
static void other_queue(void)
{
	struct ibv_srq_init_attr init = { .attr = { 4, 1, 0 } };
	struct ibv_srq *plain = ibv_create_srq(pd, &init);
	struct ibv_ops_wr *bad = NULL, wr = { .opcode = IBV_WR_TAG_SYNC };

	CHECK(plain);
	CHECK(ibv_post_srq_ops(plain, &wr, &bad) == EINVAL && bad == &wr);
	CHECK(!ibv_destroy_srq(plain));
}

static void eager(struct ibv_qp *qp)
{
	uint32_t handles[3];

	for (int i = 0; i < 3; i++)
		handles[i] = add(i, 10 + i, i);
	CHECK(handles[0] != handles[1] && handles[1] != handles[2]);
	/* In another order, and of other bits than the mask's. */
	for (int i = 2; i >= 0; i--) {
		uint64_t tag = 10 + i;

		send_message(qp, IBV_TMH_EAGER, tag, 100 + i);
		matched(i, i, tag, 100 + i);
	}
	/* A message of no bytes; one of which the tag has no memory. */
	add(5, 15, 0);
	send_message(qp, IBV_TMH_EAGER, 15, sizeof(struct ibv_tmh));
	matched(5, 0, 15, sizeof(struct ibv_tmh));
	none();
}

static void not_in_list(struct ibv_qp *qp)
{
	struct ibv_ops_wr *bad, remove = removing(7, add(6, 20, 0));

	send_message(qp, IBV_TMH_NO_TAG, 20, 90);
	not_matched(IBV_WC_TM_NO_TAG, 90);
	send_message(qp, IBV_TMH_EAGER, 21, 80);
	not_matched(IBV_WC_TM_RECV, 80);
	synchronize();
	CHECK(!ibv_post_srq_ops(srq, &remove, &bad));
	CHECK(next().wr_id == 7);
	send_message(qp, IBV_TMH_EAGER, 20, 70);
	not_matched(IBV_WC_TM_RECV, 70);
	/* Matching goes on when the count was told. */
	add(8, 22, 1);
	send_message(qp, IBV_TMH_EAGER, 22, 60);
	matched(8, 1, 22, 60);
	none();
}

/* A message comes before the tag is removed. */
static void too_late(struct ibv_qp *qp)
{
	struct ibv_ops_wr *bad, remove = removing(31, add(30, 40, 2));
	struct told told;

	send_message(qp, IBV_TMH_EAGER, 40, 50);
	CHECK(!ibv_post_srq_ops(srq, &remove, &bad));
	matched(30, 2, 40, 50);
	told = next();
	CHECK(told.status == IBV_WC_TM_ERR && told.wr_id == 31);
	none();
}

static void full(struct ibv_qp *qp)
{
	struct ibv_ops_wr list[TAGS + 2], *bad = NULL;

	for (int i = 0; i < TAGS + 2; i++) {
		list[i] = adding(50 + i, 50 + i, NULL);
		list[i].next = i <= TAGS ? &list[i + 1] : NULL;
	}
	CHECK(ibv_post_srq_ops(srq, list, &bad) == ENOMEM);
	CHECK(bad == &list[TAGS]);
	for (int i = 0; i < TAGS; i++)
		expect(50 + i, IBV_WC_TM_ADD, 0);
	/* They are used again and again; those without a completion, too. */
	for (int round = 0; round < 40; round++) {
		struct ibv_ops_wr wr = removing(60, list[round % TAGS].tm.handle);

		if (round % 3 == 0) {
			send_message(qp, IBV_TMH_EAGER, 50 + round % TAGS,
				     sizeof(struct ibv_tmh));
			CHECK(next().wr_id == 1050u + round % TAGS);
		} else {
			CHECK(!ibv_post_srq_ops(srq, &wr, &bad));
			expect(60, IBV_WC_TM_DEL, 0);
		}
		wr = adding(50 + round % TAGS, 50 + round % TAGS, NULL);
		CHECK(!ibv_post_srq_ops(srq, &wr, &bad));
		expect(50 + round % TAGS, IBV_WC_TM_ADD, 0);
		list[round % TAGS].tm.handle = wr.tm.handle;
	}
	for (int i = 0; i < TAGS; i++) {
		struct ibv_ops_wr wr = removing(70 + i, list[i].tm.handle);

		CHECK(!ibv_post_srq_ops(srq, &wr, &bad));
		expect(70 + i, IBV_WC_TM_DEL, 0);
	}
	none();
}

/* The device reads the message itself, and says so to the sender. */
static void rendezvous(struct ibv_qp *qp)
{
	struct {
		struct ibv_tmh header;
		struct ibv_rvh memory;
	} request = { .header = { .opcode = IBV_TMH_RNDV, .tag = htobe64(80) },
		      .memory = { htobe64((uintptr_t)message() + 64),
				  htobe32(mr->rkey), htobe32(150) } };
	struct ibv_sge reply = sge(of_receive(0), ROOM);
	struct ibv_sge data = sge(message(), sizeof(request));
	struct ibv_recv_wr *bad_recv, recv = { .wr_id = 5, .sg_list = &reply,
					       .num_sge = 1 };
	struct ibv_send_wr *bad, wr = { .sg_list = &data, .num_sge = 1,
					.opcode = IBV_WR_SEND,
					.send_flags = IBV_SEND_SIGNALED };
	struct ibv_tmh *end = (void *)of_receive(0);
	struct told told;

	CHECK(!ibv_post_recv(qp, &recv, &bad_recv));
	add(80, 80, 3);
	for (int i = 0; i < 150; i++)
		message()[64 + i] = i ^ 0x5a;
	memcpy(message(), &request, sizeof(request));
	CHECK(!ibv_post_send(qp, &wr, &bad));
	told = next();
	CHECK(!told.status && told.wr_id == 1080 && told.opcode == IBV_WC_TM_RECV);
	CHECK(told.flags == IBV_WC_TM_MATCH && told.tag == 80);
	told = next();
	CHECK(!told.status && told.wr_id == 1080 && told.opcode == IBV_WC_TM_RECV);
	CHECK(told.flags == IBV_WC_TM_DATA_VALID);
	CHECK(!memcmp(of_tag(3), message() + 64, 150));
	/* The request, and the message that ends it. */
	wait_sent();
	wait_sent();
	CHECK(end->opcode == IBV_TMH_FIN);
	none();
}

static struct ibv_qp *half(struct mlx5dv_qp_init_attr *own, struct ibv_cq *cq,
			   struct ibv_srq *shared)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq, .recv_cq = cq, .srq = shared, .qp_type = IBV_QPT_DRIVER,
		.comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd,
	};
	struct ibv_qp *qp;

	own->comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC;
	if (!shared) {
		init.cap = (struct ibv_qp_cap){ .max_send_wr = 8, .max_send_sge = 1 };
		init.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
		init.send_ops_flags = IBV_QP_EX_WITH_SEND;
	}
	CHECK((qp = mlx5dv_create_qp(context, &init, own)));
	return qp;
}

/* The same by a dynamic connection: to a target of the queue with the tags. */
static void dynamic(void)
{
	struct mlx5dv_qp_init_attr
		target = { .dc_init_attr = { MLX5DV_DCTYPE_DCT, .dct_access_key = 77 } },
		initiator = { .dc_init_attr = { MLX5DV_DCTYPE_DCI } };
	struct ibv_qp *to = half(&target, ibv_cq_ex_to_cq(received), srq);
	struct ibv_qp *from = half(&initiator, sent, NULL);
	struct ibv_qp_attr attr = { .port_num = 1, .path_mtu = IBV_MTU_1024,
				    .min_rnr_timer = 12, .timeout = 14, .retry_cnt = 7,
				    .rnr_retry = 7, .max_rd_atomic = 1 };
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(from);
	struct ibv_port_attr port;
	struct ibv_ah *ah;

	CHECK(!ibv_query_port(context, 1, &port));
	attr.ah_attr = (struct ibv_ah_attr){ .port_num = 1, .dlid = port.lid,
					     .is_global = 1 };
	CHECK(!ibv_query_gid(context, 1, 0, &attr.ah_attr.grh.dgid));
	CHECK((ah = ibv_create_ah(pd, &attr.ah_attr)));
	attr.qp_state = IBV_QPS_INIT;
	CHECK(!ibv_modify_qp(to, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					IBV_QP_ACCESS_FLAGS));
	CHECK(!ibv_modify_qp(from, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(to, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
					IBV_QP_MIN_RNR_TIMER));
	CHECK(!ibv_modify_qp(from, &attr, IBV_QP_STATE | IBV_QP_PATH_MTU));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(from, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT |
					  IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					  IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
	for (int round = 0; round < 12; round++) {
		uint32_t length = round % 2 ? 20 : 200;
		uint64_t tag = 90 + round;

		/* Every third is unexpected. */
		if (round % 3)
			add(round, tag, 1);
		make_message(IBV_TMH_EAGER, tag, length);
		ibv_wr_start(ex);
		ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_send(ex);
		mlx5dv_wr_set_dc_addr(mlx5dv_qp_ex_from_ibv_qp_ex(ex), ah, to->qp_num, 77);
		ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)message(), length);
		CHECK(!ibv_wr_complete(ex));
		wait_sent();
		if (round % 3) {
			matched(round, 1, tag, length);
		} else {
			not_matched(IBV_WC_TM_RECV, length);
			synchronize();
		}
	}
	none();
	CHECK(!ibv_destroy_qp(from) && !ibv_destroy_qp(to) && !ibv_destroy_ah(ah));
}

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC };
	struct ibv_qp *from, *to;

	CHECK(devices && (context = ibv_open_device(devices[0])));
	CHECK((pd = ibv_alloc_pd(context)));
	CHECK((memory = aligned_alloc(4096, (16 + RECEIVES) * ROOM)));
	mr = ibv_reg_mr(pd, memory, (16 + RECEIVES) * ROOM,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
	CHECK(mr);
	create_queues();
	other_queue();
	/* One that sends nothing: its sends are the device's. */
	init.send_cq = init.recv_cq = ibv_cq_ex_to_cq(received);
	init.srq = srq;
	CHECK((to = ibv_create_qp(pd, &init)));
	init = (struct ibv_qp_init_attr){ .qp_type = IBV_QPT_RC,
					  .send_cq = sent,
					  .recv_cq = sent,
					  .cap = { 8, 8, 1, 1, 0 } };
	CHECK((from = ibv_create_qp(pd, &init)));
	connect_to(to, from->qp_num);
	connect_to(from, to->qp_num);
	eager(from);
	not_in_list(from);
	too_late(from);
	full(from);
	rendezvous(from);
	dynamic();
	CHECK(!ibv_destroy_qp(from) && !ibv_destroy_qp(to));
	CHECK(!ibv_destroy_srq(srq));
	CHECK(!ibv_destroy_cq(ibv_cq_ex_to_cq(received)) && !ibv_destroy_cq(sent));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	ibv_free_device_list(devices);
	puts("well");
	return 0;
}

/* SPDX-License-Identifier: MIT */
/*
 * Datagrams with wrong queue keys and partition keys are dropped and counted. The table of
 * partition keys of an InfiniBand port has the default key at 0, and is empty otherwise; that of
 * an Ethernet port has the default key alone. Without common.h. RXE_GID is the index of an Ethernet port's
 * GID.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define QKEY 0x11111111
#define TIMES 3

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct ibv_ah *ah;
static char memory[4096];

static struct ibv_qp *new_qp(void)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_UD, .cap = {16, 16, 1, 1, 0},
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	CHECK(qp);
	return qp;
}

static int initialize(struct ibv_qp *qp, int pkey_index)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY, .pkey_index = pkey_index,
	};

	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
}

static void start(struct ibv_qp *qp, int pkey_index)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR}, found;
	struct ibv_qp_init_attr init;

	CHECK(!initialize(qp, pkey_index));
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	CHECK(!ibv_query_qp(qp, &found, IBV_QP_PKEY_INDEX, &init));
	CHECK(found.pkey_index == pkey_index);
}

static struct ibv_wc completion(void)
{
	time_t end = time(NULL) + 60;
	struct ibv_wc wc;

	while (ibv_poll_cq(cq, 1, &wc) != 1)
		CHECK(time(NULL) < end);
	CHECK(wc.status == IBV_WC_SUCCESS);
	return wc;
}

static void receive(struct ibv_qp *qp, int id)
{
	struct ibv_sge sge = {(uintptr_t)memory + 2048, 2048, mr->lkey};
	struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1}, *bad;

	CHECK(!ibv_post_recv(qp, &wr, &bad));
}

static void send_to(struct ibv_qp *qp, struct ibv_qp *to, uint32_t qkey)
{
	struct ibv_sge sge = {(uintptr_t)memory, 8, mr->lkey};
	struct ibv_send_wr wr = {
		.wr_id = 100, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.ud = {ah, to->qp_num, qkey},
	}, *bad;

	CHECK(!ibv_post_send(qp, &wr, &bad));
	CHECK(completion().wr_id == 100);
}

static struct ibv_port_attr port(void)
{
	struct ibv_port_attr port;

	CHECK(!ibv_query_port(context, 1, &port));
	return port;
}

/* Sends some datagrams that are dropped, then one that arrives. */
static void violate(struct ibv_qp *from, struct ibv_qp *to, uint32_t qkey, struct ibv_qp *right)
{
	receive(to, 1);
	for (int i = 0; i < TIMES; i++)
		send_to(from, to, qkey);
	send_to(right, to, QKEY);
	CHECK(completion().wr_id == 1);
}

int main(void)
{
	struct ibv_device **all = ibv_get_device_list(NULL);
	const char *wanted = getenv("RXE_DEV"), *gid = getenv("RXE_GID");
	struct ibv_ah_attr path = {.port_num = 1};
	struct ibv_port_attr before, after;
	struct ibv_qp *a, *b, *other;
	int ethernet;

	for (int i = 0; all && all[i] && !context; i++)
		if (!wanted || !strcmp(wanted, ibv_get_device_name(all[i])))
			context = ibv_open_device(all[i]);
	CHECK(context);
	before = port();
	ethernet = before.link_layer == IBV_LINK_LAYER_ETHERNET;
	CHECK(before.pkey_tbl_len == (ethernet ? 1 : 128));
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	CHECK(pd && cq);
	mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr);
	path.dlid = before.lid;
	if (ethernet) {
		path.is_global = 1;
		path.grh.sgid_index = gid && *gid ? atoi(gid) : 0;
		path.grh.hop_limit = 1;
		CHECK(!ibv_query_gid(context, 1, path.grh.sgid_index, &path.grh.dgid));
	}
	ah = ibv_create_ah(pd, &path);
	CHECK(ah);
	a = new_qp();
	b = new_qp();
	other = new_qp();
	start(a, 0);
	start(b, 0);

	violate(a, b, QKEY + 1, a);
	after = port();
	CHECK(after.qkey_viol_cntr == before.qkey_viol_cntr + TIMES);
	CHECK(after.bad_pkey_cntr == before.bad_pkey_cntr);

	/* The device's limit, also of an Ethernet port, which has the default key at each index. */
	CHECK(initialize(other, 128) == EINVAL);
	if (ethernet) {
		start(other, 1);
		receive(b, 2);
		send_to(other, b, QKEY);
		CHECK(completion().wr_id == 2);
		CHECK(port().bad_pkey_cntr == 0);
	} else {
		/* From a queue pair without a partition, and to one. */
		before = after;
		start(other, 1);
		violate(other, b, QKEY, a);
		after = port();
		CHECK(after.bad_pkey_cntr == before.bad_pkey_cntr + TIMES);
		receive(other, 2);
		send_to(a, other, QKEY);
		send_to(other, other, QKEY);
		receive(b, 3);
		send_to(a, b, QKEY);
		CHECK(completion().wr_id == 3);
		after = port();
		CHECK(after.bad_pkey_cntr == before.bad_pkey_cntr + TIMES + 2);
		CHECK(after.qkey_viol_cntr == before.qkey_viol_cntr);
	}
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_qp(b) && !ibv_destroy_qp(other));
	CHECK(!ibv_destroy_ah(ah) && !ibv_dereg_mr(mr) && !ibv_destroy_cq(cq));
	CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context));
	puts("well");
	return 0;
}

/* SPDX-License-Identifier: MIT */
/*
 * Attributes of queue pairs that few devices support: enhanced connection
 * establishment, rate limits, in-order data. Prints the device's results.
 * usage: attributes CASE...|all
 */
#include "common.h"

static void print_ece(const char *when, struct ibv_qp *qp)
{
	struct ibv_ece ece = {.vendor_id = 1, .options = 2, .comp_mask = 3};
	int rc = ibv_query_ece(qp, &ece);

	printf("%s: %d, vendor %#x options %#x mask %#x\n", when, rc,
	       ece.vendor_id, ece.options, ece.comp_mask);
}

static void ece(void)
{
	struct pair_opts opts = {.type = IBV_QPT_RC, .unconnected = true};
	struct ibv_ece ece = {.vendor_id = 0x15b3, .options = 0x30000002};
	union ibv_gid gid;
	struct pair p;

	pair_open(&p, opts);
	print_ece("created", p.a.qp);
	ece.comp_mask = 1;
	printf("a mask: %d\n", ibv_set_ece(p.a.qp, &ece));
	ece.comp_mask = 0;
	ece.vendor_id = 0x1234;
	printf("another vendor: %d\n", ibv_set_ece(p.a.qp, &ece));
	print_ece("unchanged", p.a.qp);
	ece.vendor_id = 0x15b3;
	printf("set: %d\n", ibv_set_ece(p.a.qp, &ece));
	print_ece("set", p.a.qp);
	OK(ibv_query_gid(p.ctx, 1, gid_index(p.ctx), &gid));
	end_connect(&p.a, &p.o, p.b.qp->qp_num, &gid);
	print_ece("connected", p.a.qp);
	end_connect(&p.b, &p.o, p.a.qp->qp_num, &gid);
	print_ece("peer", p.b.qp);
	pair_close(&p);
}

static void order(void)
{
	struct pair_opts opts = {.type = IBV_QPT_RC, .unconnected = true};
	union ibv_gid gid;
	struct pair p;

	pair_open(&p, opts);
	printf("created: %d\n",
	       ibv_query_qp_data_in_order(p.a.qp, IBV_WR_RDMA_WRITE, 0));
	OK(ibv_query_gid(p.ctx, 1, gid_index(p.ctx), &gid));
	end_connect(&p.a, &p.o, p.b.qp->qp_num, &gid);
	printf("connected: %d\n",
	       ibv_query_qp_data_in_order(p.a.qp, IBV_WR_RDMA_WRITE, 0));
	printf("unknown flags: %d\n",
	       ibv_query_qp_data_in_order(p.a.qp, IBV_WR_SEND, 1 << 20));
	pair_close(&p);
}

static void rate(void)
{
	struct pair_opts opts = {.type = IBV_QPT_RC, .unconnected = true};
	struct ibv_qp_rate_limit_attr attr = {.rate_limit = 1000};
	struct ibv_qp_attr qp_attr = {.rate_limit = 1000};
	struct ibv_device_attr_ex device;
	struct pair p;

	pair_open(&p, opts);
	OK(ibv_query_device_ex(p.ctx, NULL, &device));
	printf("limits %u %u of %#x\n",
	       device.packet_pacing_caps.qp_rate_limit_min,
	       device.packet_pacing_caps.qp_rate_limit_max,
	       device.packet_pacing_caps.supported_qpts);
	printf("of RC: %d\n", ibv_modify_qp_rate_limit(p.a.qp, &attr));
	printf("by ibv_modify_qp: %d\n",
	       ibv_modify_qp(p.a.qp, &qp_attr, IBV_QP_RATE_LIMIT));
	attr.comp_mask = 1;
	printf("a mask: %d\n", ibv_modify_qp_rate_limit(p.a.qp, &attr));
	attr.comp_mask = 0;
	attr.max_burst_sz = 100;
	printf("bursts: %d\n", ibv_modify_qp_rate_limit(p.a.qp, &attr));
	attr.rate_limit = 0;
	printf("bursts without a rate: %d\n",
	       ibv_modify_qp_rate_limit(p.a.qp, &attr));
	pair_close(&p);
}

int main(int argc, char **argv)
{
	static const struct test_case cases[] = {
		{"ece", ece}, {"order", order}, {"rate", rate},
	};

	return test_main(argc, argv, cases, ARRAY_SIZE(cases), 60);
}

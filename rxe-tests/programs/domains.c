/* SPDX-License-Identifier: MIT */
/*
 * Thread domains and parent domains: queues of one thread. The stock provider for
 * rxe supports neither (EOPNOTSUPP).
 */
#include "common.h"

static struct pair p;

struct domain {
	struct ibv_td *td;
	struct ibv_pd *pd, *parent;
};

static void domain_open(struct ibv_context *ctx, struct domain *d, bool with_td)
{
	struct ibv_td_init_attr td = {};
	struct ibv_parent_domain_init_attr attr = {};

	d->td = with_td ? MUST(ibv_alloc_td(ctx, &td)) : NULL;
	if (d->td)
		CHECK(d->td->context == ctx);
	d->pd = MUST(ibv_alloc_pd(ctx));
	attr.pd = d->pd;
	attr.td = d->td;
	d->parent = MUST(ibv_alloc_parent_domain(ctx, &attr));
	CHECK(d->parent != d->pd);
	CHECK(d->parent->context == ctx);
}

static void domain_close(struct domain *d)
{
	OK(ibv_dealloc_pd(d->parent));
	OK(ibv_dealloc_pd(d->pd));
	if (d->td)
		OK(ibv_dealloc_td(d->td));
}

/* Traffic on objects of the domain, through either post interface. */
static void traffic_in(struct ibv_context *ctx, struct ibv_pd *pd, enum api api)
{
	struct pair_opts o = {
		.type = IBV_QPT_RC, .api = api, .srq = true, .inl = 64};
	union ibv_gid gid;
	struct end a, b;
	int i, j;

	OK(ibv_query_gid(ctx, 1, gid_index(ctx), &gid));
	end_open(&a, ctx, pd, &o, false);
	end_open(&b, ctx, pd, &o, true);
	CHECK(a.qp->pd == pd && a.mr->pd == pd && b.srq->pd == pd);
	end_connect(&a, &o, b.qp->qp_num, &gid);
	end_connect(&b, &o, a.qp->qp_num, &gid);
	for (i = 0; i < 100; i++) {
		struct op ops[4];

		for (j = 0; j < 4; j++) {
			ops[j] = op_on(&a, IBV_WR_SEND, 4 * i + j, 100 * j, 60);
			if (j % 2)
				ops[j].flags |= IBV_SEND_INLINE;
			pattern(a.buf + 100 * j, 60, i + j);
			post_recv(&b, 4 * i + j, 100 * j, 64);
		}
		POST_OK(&a, ops, 4, api);
		for (j = 0; j < 4; j++) {
			EXPECT_WC(&a, 4 * i + j, IBV_WC_SEND, 60);
			EXPECT_WC(&b, 4 * i + j, IBV_WC_RECV, 60);
			CHECK_PATTERN(b.buf + 100 * j, 60, i + j);
		}
	}
	end_close(&a);
	end_close(&b);
}

static void t_traffic(void)
{
	struct ibv_context *ctx = open_device();
	struct domain d;
	int i;

	for (i = 0; i < 4; i++) {
		domain_open(ctx, &d, i % 2);
		traffic_in(ctx, d.parent, i / 2 ? WR : POST);
		/* The PD of the parent domain is usable, too. */
		traffic_in(ctx, d.pd, i / 2 ? WR : POST);
		domain_close(&d);
	}
	OK(ibv_close_device(ctx));
}

/* A region of the PD is usable on a queue pair of its parent domain. */
static void t_shared_region(void)
{
	struct pair_opts o = {.type = IBV_QPT_RC};
	struct ibv_context *ctx = open_device();
	struct domain d;
	union ibv_gid gid;
	struct end a, b;
	struct op op;

	domain_open(ctx, &d, true);
	OK(ibv_query_gid(ctx, 1, gid_index(ctx), &gid));
	end_open(&a, ctx, d.parent, &o, false);
	end_open(&b, ctx, d.pd, &o, false);
	end_connect(&a, &o, b.qp->qp_num, &gid);
	end_connect(&b, &o, a.qp->qp_num, &gid);
	op = op_on(&a, IBV_WR_RDMA_WRITE, 5, 0, 100);
	op.sge[0] = sge_on(&b, 5000, 100); /* b's region on a's queue */
	pattern(b.buf + 5000, 100, 9);
	op.remote = (uintptr_t)b.buf;
	op.rkey = b.mr->rkey;
	POST_OK(&a, &op, 1, POST);
	EXPECT_WC(&a, 5, IBV_WC_RDMA_WRITE, 100);
	CHECK_PATTERN(b.buf, 100, 9);
	end_close(&a);
	end_close(&b);
	domain_close(&d);
	OK(ibv_close_device(ctx));
}

/* Domains in use cannot be deallocated, and stay usable. */
static void t_busy(void)
{
	struct ibv_context *ctx = open_device();
	struct domain d;

	domain_open(ctx, &d, true);
	EQ(ibv_dealloc_td(d.td), EBUSY);
	EQ(ibv_dealloc_pd(d.pd), EBUSY);
	traffic_in(ctx, d.parent, POST);
	domain_close(&d);
	OK(ibv_close_device(ctx));
}

/* A single-threaded completion queue in a parent domain. */
static void t_cq(void)
{
	struct ibv_cq_init_attr_ex attr = {
		.cqe = 16,
		.wc_flags = IBV_WC_EX_WITH_BYTE_LEN,
		.comp_mask = IBV_CQ_INIT_ATTR_MASK_PD |
			     IBV_CQ_INIT_ATTR_MASK_FLAGS,
		.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED,
	};
	struct ibv_poll_cq_attr poll = {};
	struct domain d;
	struct ibv_cq_ex *cq;
	struct ibv_qp *qp;
	int i, rc = ENOENT;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC});
	domain_open(p.ctx, &d, true);
	attr.parent_domain = d.parent;
	cq = MUST(ibv_create_cq_ex(p.ctx, &attr));
	struct ibv_qp_init_attr init = {.send_cq = ibv_cq_ex_to_cq(cq),
					.recv_cq = ibv_cq_ex_to_cq(cq),
					.cap = {8, 8, 1, 1, 0},
					.qp_type = IBV_QPT_RC};
	qp = MUST(ibv_create_qp(d.parent, &init));
	struct ibv_qp_attr to_init = {.qp_state = IBV_QPS_INIT, .port_num = 1};
	struct ibv_recv_wr wr = {.wr_id = 5}, *bad;

	OK(ibv_modify_qp(qp, &to_init,
			 IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				 IBV_QP_ACCESS_FLAGS));
	for (i = 0; i < 5; i++)
		OK(ibv_post_recv(qp, &wr, &bad));
	qp_to(qp, IBV_QPS_ERR);
	sleep_ms(200);
	for (i = 0; i < 5; i++) {
		rc = i ? ibv_next_poll(cq) : ibv_start_poll(cq, &poll);
		OK(rc);
		EQ(cq->wr_id, 5);
		EQ(cq->status, IBV_WC_WR_FLUSH_ERR);
	}
	EQ(ibv_next_poll(cq), ENOENT);
	ibv_end_poll(cq);
	EQ(ibv_start_poll(cq, &poll), ENOENT);
	OK(ibv_destroy_qp(qp));
	OK(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
	domain_close(&d);
	pair_close(&p);
}

/* Invalid attributes are refused. */
static void t_refused(void)
{
	struct ibv_context *ctx = open_device();
	struct ibv_td_init_attr td = {.comp_mask = 1 << 30};
	struct ibv_parent_domain_init_attr attr = {};
	struct ibv_pd *pd = MUST(ibv_alloc_pd(ctx)), *cc;

	errno = 0;
	CHECK(!ibv_alloc_td(ctx, &td));
	CHECK(errno == EOPNOTSUPP || errno == EINVAL);
	attr.pd = pd;
	attr.comp_mask = 1 << 30;
	errno = 0;
	CHECK(!ibv_alloc_parent_domain(ctx, &attr));
	CHECK(errno == EOPNOTSUPP || errno == EINVAL);
	/* ALLOW_CC_UNPROTECTED_ALLOC, which older headers do not define: a
	 * permission that a provider may ignore. */
	attr.comp_mask = 1 << 2;
	cc = MUST(ibv_alloc_parent_domain(ctx, &attr));
	OK(ibv_dealloc_pd(cc));
	attr.comp_mask = 0;
	attr.pd = NULL;
	errno = 0;
	CHECK(!ibv_alloc_parent_domain(ctx, &attr));
	CHECK(errno == EINVAL);
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
}

static const struct test_case cases[] = {
	{"traffic", t_traffic},
	{"shared-region", t_shared_region},
	{"busy", t_busy},
	{"cq", t_cq},
	{"refused", t_refused},
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, ARRAY_SIZE(cases), 60);
}

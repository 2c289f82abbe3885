/* SPDX-License-Identifier: MIT */
/*
 * Further verbs of the kernel's rxe: reregistration of regions, advice, and resizing
 * a shared receive queue with posted receives.
 */
#include "common.h"

static struct pair p;

static void write_to(struct ibv_mr *mr, uint64_t id, unsigned allowed)
{
	struct op op = op_on(&p.a, IBV_WR_RDMA_WRITE, id, 0, 100);
	struct ibv_wc wc;

	op.remote = (uintptr_t)p.b.buf;
	op.rkey = mr->rkey;
	pattern(p.a.buf, 100, id);
	POST_OK(&p.a, &op, 1, POST);
	wc = POLL(p.a.cq);
	check_status(__FILE__, __LINE__, &wc, id, allowed, p.a.qp->qp_num);
	if (wc.status == IBV_WC_SUCCESS)
		CHECK_PATTERN(p.b.buf, 100, id);
}

/* Reregistration changes access and protection domain of a region. */
static void t_rereg(void)
{
	const int rw = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	struct ibv_pd *other;
	struct ibv_mr *mr;
	uint32_t lkey, rkey;

	if (!kernel_at_least(6, 5))
		SKIP("this kernel's rxe has no reregistration");
	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC});
	other = MUST(ibv_alloc_pd(p.ctx));
	mr = MUST(ibv_reg_mr(p.pd, p.b.buf, 4096, rw));
	lkey = mr->lkey;
	rkey = mr->rkey;
	write_to(mr, 1, ONLY(IBV_WC_SUCCESS));
	OK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, other, NULL, 0, 0));
	CHECK(mr->pd == other);
	OK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, p.pd, NULL, 0, 0));
	CHECK(mr->pd == p.pd);
	write_to(mr, 2, ONLY(IBV_WC_SUCCESS));
	OK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0,
			IBV_ACCESS_LOCAL_WRITE));
	CHECK(mr->lkey == lkey && mr->rkey == rkey);
	CHECK(mr->addr == p.b.buf && mr->length == 4096);
	write_to(mr, 3, ONLY(IBV_WC_REM_ACCESS_ERR));
	/* rxe refuses another address, and the region is unchanged. */
	CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL,
			   p.b.buf + 4096, 4096, 0));
	CHECK(mr->addr == p.b.buf && mr->length == 4096);
	OK(ibv_dereg_mr(mr));
	OK(ibv_dealloc_pd(other));
	pair_close(&p);
}

/* On-demand paging, if the kernel's rxe has it, and prefetching. */
static void t_odp(void)
{
	struct ibv_device_attr_ex attr = {};
	struct ibv_context *ctx = open_device();
	struct ibv_sge sge;
	struct ibv_mr *mr;

	OK(ibv_query_device_ex(ctx, NULL, &attr));
	if (!(attr.odp_caps.general_caps & IBV_ODP_SUPPORT))
		SKIP("this kernel's rxe has no on-demand paging");
	pair_open_on(&p, ctx, (struct pair_opts){.type = IBV_QPT_RC});
	mr = MUST(ibv_reg_mr(p.pd, p.b.buf, p.b.size,
			     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
				     IBV_ACCESS_ON_DEMAND));
	sge = (struct ibv_sge){(uintptr_t)p.b.buf, 65536, mr->lkey};
	OK(ibv_advise_mr(p.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE,
			 IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1));
	write_to(mr, 1, ONLY(IBV_WC_SUCCESS));
	/* Discarded pages are faulted in again. */
	CHECK(!madvise(p.b.buf, p.b.size, MADV_DONTNEED));
	write_to(mr, 2, ONLY(IBV_WC_SUCCESS));
	OK(ibv_dereg_mr(mr));
	pair_close(&p);
}

/* Posted receives are kept, in order, when a shared receive queue is resized. */
static void t_srq_resize(void)
{
	static const unsigned size[] = {200, 50, 1000, 40};
	struct ibv_srq_attr attr = {}, got;
	uint64_t posted = 0, next = 0;
	size_t i;
	int j;

	pair_open(&p, (struct pair_opts){.type = IBV_QPT_RC, .srq = true});
	for (i = 0; i < 3 * ARRAY_SIZE(size); i++) {
		while (posted < next + 30)
			post_recv(&p.b, posted++, 0, 64);
		attr.max_wr = size[i % ARRAY_SIZE(size)];
		OK(ibv_modify_srq(p.b.srq, &attr, IBV_SRQ_MAX_WR));
		OK(ibv_query_srq(p.b.srq, &got));
		CHECK(got.max_wr >= attr.max_wr);
		/*
		 * A size that is too small for the posted receives is refused.
		 * (Kernels before 6.5 lose the queue then, and dereference a
		 * null pointer at the next message.)
		 */
		attr.max_wr = 10;
		if (kernel_at_least(6, 5))
			CHECK(ibv_modify_srq(p.b.srq, &attr, IBV_SRQ_MAX_WR));
		while (posted < next + 35)
			post_recv(&p.b, posted++, 0, 64);
		for (j = 0; j < 25; j++) {
			struct op op = op_on(&p.a, IBV_WR_SEND, next, 0, 64);

			pattern(p.a.buf, 64, next);
			POST_OK(&p.a, &op, 1, POST);
			EXPECT_WC(&p.a, next, IBV_WC_SEND, 64);
			EXPECT_WC(&p.b, next, IBV_WC_RECV, 64);
			CHECK_PATTERN(p.b.buf, 64, next);
			next++;
		}
	}
	pair_close(&p);
}

static const struct test_case cases[] = {
	{"rereg", t_rereg},
	{"odp", t_odp},
	{"srq-resize", t_srq_resize},
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, ARRAY_SIZE(cases), 60);
}

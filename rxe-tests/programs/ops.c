/* SPDX-License-Identifier: MIT */
/*
 * Every operation of the send queue, through ibv_post_send and through ibv_wr_*:
 * data, unmodified neighbouring bytes, and all fields of the completions.
 * usage: ops rc|uc|ud post|wr CASE
 */
#include "common.h"

static enum ibv_qp_type type;
static enum api api;
static struct pair p;

#define RC_ONLY()                                                              \
	do {                                                                   \
		if (type != IBV_QPT_RC)                                        \
			SKIP("reliable connections only");                     \
	} while (0)
#define NOT_UD()                                                               \
	do {                                                                   \
		if (type == IBV_QPT_UD)                                        \
			SKIP("not an operation of datagrams");                 \
	} while (0)

/* The receive buffer of a datagram starts with the 40-byte GRH. */
static uint32_t grh_len(void)
{
	return type == IBV_QPT_UD ? 40 : 0;
}

static void open_pair(struct pair_opts o)
{
	o.type = type;
	o.api = api;
	pair_open(&p, o);
}

static struct op op_a(enum ibv_wr_opcode opcode, uint64_t id, size_t off,
		      uint32_t len)
{
	struct op op = op_on(&p.a, opcode, id, off, len);

	op.remote = (uintptr_t)p.b.buf;
	op.rkey = p.b.mr->rkey;
	return op;
}

static void post_a(const struct op *op)
{
	POST_OK(&p.a, op, 1, api);
}

/* Expects the sender's completion. rxe sets WITH_IMM there, too. */
static void expect_sent(const struct op *op, uint32_t len)
{
	bool imm = op->opcode == IBV_WR_SEND_WITH_IMM ||
		   op->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	struct ibv_wc wc = POLL(p.a.cq);

	check_wc(__FILE__, __LINE__, &wc, op->wr_id, wc_opcode_of(op->opcode),
		 len, p.a.qp->qp_num, 0, imm ? IBV_WC_WITH_IMM : 0, 0);
}

/* Expects the receiver's completion. That of a datagram has the sender's QP. */
static void expect_received(uint64_t id, enum ibv_wc_opcode opcode, uint32_t len,
			    unsigned flags, uint32_t imm)
{
	struct ibv_wc wc = POLL(p.b.cq);

	if (opcode == IBV_WC_RECV)
		len += grh_len();
	check_wc(__FILE__, __LINE__, &wc, id, opcode, len, p.b.qp->qp_num,
		 type == IBV_QPT_UD ? p.a.qp->qp_num : 0, flags, imm);
	if (type == IBV_QPT_UD)
		CHECK(wc.wc_flags & IBV_WC_GRH);
}

/* Sizes around the boundaries of words and packets. */
static size_t sizes(uint32_t *out)
{
	const uint32_t m = p.mtu;
	const uint32_t some[] = {1,	2,	3,	 5,	   64,	  65,
				 m - 1, m,	m + 1,	 2 * m,	   3 * m + 7,
				 16 * m, 65537, 100000};
	size_t i, n = 0;

	for (i = 0; i < ARRAY_SIZE(some); i++)
		if (type != IBV_QPT_UD || some[i] <= m)
			out[n++] = some[i];
	return n;
}

static void send_sizes(bool imm)
{
	uint32_t size[32];
	size_t n, i;

	open_pair((struct pair_opts){});
	n = sizes(size);
	for (i = 0; i < n; i++) {
		struct op op = op_a(imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND,
				    0xabcdef0100000000 + i, 64, size[i]);

		op.imm = htonl(0x01020300 + i);
		pattern(p.a.buf + 64, size[i], i);
		memset(p.b.buf, 0xee, size[i] + 256);
		post_recv(&p.b, 0x5500000000000000 + i, 128 - grh_len(),
			  size[i] + grh_len());
		post_a(&op);
		expect_sent(&op, size[i]);
		expect_received(0x5500000000000000 + i, IBV_WC_RECV, size[i],
				imm ? IBV_WC_WITH_IMM : 0, op.imm);
		CHECK_PATTERN(p.b.buf + 128, size[i], i);
		CHECK_BYTE(p.b.buf, 128 - grh_len(), 0xee);
		CHECK_BYTE(p.b.buf + 128 + size[i], 64, 0xee);
	}
	EXPECT_NO_WC(p.a.cq);
	EXPECT_NO_WC(p.b.cq);
	pair_close(&p);
}

static void t_send(void)
{
	send_sizes(false);
}

static void t_send_imm(void)
{
	send_sizes(true);
}

/* A message shorter than the buffer: right byte_len, the rest is unmodified. */
static void t_short(void)
{
	struct op op;

	open_pair((struct pair_opts){});
	op = op_a(IBV_WR_SEND, 1, 0, 10);
	pattern(p.a.buf, 10, 9);
	post_recv(&p.b, 2, 0, 500);
	post_a(&op);
	expect_sent(&op, 10);
	expect_received(2, IBV_WC_RECV, 10, 0, 0);
	CHECK_PATTERN(p.b.buf + grh_len(), 10, 9);
	CHECK_BYTE(p.b.buf + grh_len() + 10, 500, 0xee);
	pair_close(&p);
}

static void write_sizes(bool imm)
{
	uint32_t size[32];
	size_t n, i;

	NOT_UD();
	open_pair((struct pair_opts){});
	n = sizes(size);
	for (i = 0; i < n; i++) {
		struct op op = op_a(imm ? IBV_WR_RDMA_WRITE_WITH_IMM :
					  IBV_WR_RDMA_WRITE,
				    0x1000 + i, 8, size[i]);

		op.remote += 192;
		op.imm = htonl(0xfffefd00 + i);
		pattern(p.a.buf + 8, size[i], i + 50);
		memset(p.b.buf, 0xee, size[i] + 512);
		if (imm)
			post_recv(&p.b, 0x2000 + i, 0, 64);
		post_a(&op);
		expect_sent(&op, size[i]);
		if (imm)
			expect_received(0x2000 + i, IBV_WC_RECV_RDMA_WITH_IMM, size[i],
					IBV_WC_WITH_IMM, op.imm);
		else if (type == IBV_QPT_UC)
			sleep_ms(50); /* UC completes when the write is sent */
		CHECK_PATTERN(p.b.buf + 192, size[i], i + 50);
		CHECK_BYTE(p.b.buf, 192, 0xee);
		CHECK_BYTE(p.b.buf + 192 + size[i], 64, 0xee);
	}
	EXPECT_NO_WC(p.b.cq);
	pair_close(&p);
}

static void t_write(void)
{
	write_sizes(false);
}

static void t_write_imm(void)
{
	write_sizes(true);
}

static void t_read(void)
{
	uint32_t size[32];
	size_t n, i;

	RC_ONLY();
	open_pair((struct pair_opts){});
	n = sizes(size);
	for (i = 0; i < n; i++) {
		struct op op = op_a(IBV_WR_RDMA_READ, 0x3000 + i, 64, size[i]);

		op.remote += 24;
		pattern(p.b.buf + 24, size[i], i + 90);
		memset(p.a.buf, 0xee, size[i] + 256);
		post_a(&op);
		expect_sent(&op, size[i]);
		CHECK_PATTERN(p.a.buf + 64, size[i], i + 90);
		CHECK_BYTE(p.a.buf, 64, 0xee);
		CHECK_BYTE(p.a.buf + 64 + size[i], 64, 0xee);
	}
	EXPECT_NO_WC(p.b.cq);
	pair_close(&p);
}

static void t_cas(void)
{
	const uint64_t start = 0x1122334455667788, other = 0x99aabbccddeeff01;
	uint64_t *local, *remote;
	struct op op;

	RC_ONLY();
	open_pair((struct pair_opts){});
	local = (uint64_t *)(p.a.buf + 16);
	remote = (uint64_t *)(p.b.buf + 40);
	op = op_a(IBV_WR_ATOMIC_CMP_AND_SWP, 7, 16, 8);
	op.remote = (uintptr_t)remote;

	*remote = start; /* equal: swapped */
	op.compare_add = start;
	op.swap = other;
	post_a(&op);
	expect_sent(&op, 8);
	EQ(*local, start);
	EQ(*(volatile uint64_t *)remote, other);

	op.wr_id = 8; /* not equal: kept, the old value is returned */
	op.swap = 5;
	post_a(&op);
	expect_sent(&op, 8);
	EQ(*local, other);
	EQ(*(volatile uint64_t *)remote, other);
	CHECK_BYTE(p.b.buf, 40, 0xee);
	CHECK_BYTE(p.b.buf + 48, 64, 0xee);
	CHECK_BYTE(p.a.buf, 16, 0xee);
	CHECK_BYTE(p.a.buf + 24, 64, 0xee);
	pair_close(&p);
}

static void t_faa(void)
{
	uint64_t *local, *remote, sum = 0xffffffff00000000;
	struct op op;
	int i;

	RC_ONLY();
	open_pair((struct pair_opts){});
	local = (uint64_t *)(p.a.buf + 16);
	remote = (uint64_t *)(p.b.buf + 40);
	*remote = sum;
	op = op_a(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 16, 8);
	op.remote = (uintptr_t)remote;
	for (i = 0; i < 20; i++) {
		op.wr_id = 100 + i;
		op.compare_add = 0x10000001ULL * (i + 1);
		post_a(&op);
		expect_sent(&op, 8);
		EQ(*local, sum);
		sum += op.compare_add;
		EQ(*(volatile uint64_t *)remote, sum);
	}
	CHECK_BYTE(p.b.buf + 48, 64, 0xee);
	CHECK_BYTE(p.a.buf + 24, 64, 0xee);
	pair_close(&p);
}

static void t_atomic_write(void)
{
	RC_ONLY();
#ifndef HAVE_WR_ATOMIC_WRITE
	SKIP("these headers have no ibv_wr_atomic_write");
#else
	struct op op;
	int i;

	if (api == POST)
		SKIP("ibv_post_send has no field for the value");
	open_pair((struct pair_opts){});
	if (!(device_caps_ex(p.ctx) & CAP_ATOMIC_WRITE))
		SKIP("this kernel's rxe has no atomic write");
	for (i = 0; i < 4; i++) {
		memset(&op, 0, sizeof(op));
		op.opcode = IBV_WR_ATOMIC_WRITE;
		op.flags = IBV_SEND_SIGNALED;
		op.wr_id = 70 + i;
		op.remote = (uintptr_t)p.b.buf + 64;
		op.rkey = p.b.mr->rkey;
		pattern(op.value, 8, i);
		post_a(&op);
		expect_sent(&op, 8);
		CHECK_PATTERN(p.b.buf + 64, 8, i);
	}
	CHECK_BYTE(p.b.buf, 64, 0xee);
	CHECK_BYTE(p.b.buf + 72, 64, 0xee);
	pair_close(&p);
#endif
}

static void t_flush(void)
{
	RC_ONLY();
#ifndef HAVE_WR_FLUSH
	SKIP("these headers have no ibv_wr_flush");
#else
	struct op ops[2] = {};
	struct ibv_context *ctx = open_device();
	uint64_t caps = device_caps_ex(ctx);
	int i;

	if (api == POST)
		SKIP("ibv_post_send has no fields for type and level");
	if (!(caps & CAP_FLUSH_GLOBAL))
		SKIP("this kernel's rxe has no flush");
	pair_open_on(&p, ctx,
		     (struct pair_opts){.type = type,
					.api = api,
					.mr_access = ACCESS_FLUSH_GLOBAL});
	/* A write, then its flush: of a range, then of the whole region. */
	for (i = 0; i < 2; i++) {
		ops[0] = op_a(IBV_WR_RDMA_WRITE, 80 + i, 0, 100);
		pattern(p.a.buf, 100, 30 + i);
		ops[1].opcode = IBV_WR_FLUSH;
		ops[1].flags = IBV_SEND_SIGNALED;
		ops[1].wr_id = 90 + i;
		ops[1].remote = (uintptr_t)p.b.buf;
		ops[1].rkey = p.b.mr->rkey;
		ops[1].flush_type = IBV_FLUSH_GLOBAL;
		ops[1].flush_level = i ? IBV_FLUSH_MR : IBV_FLUSH_RANGE;
		ops[1].flush_len = 100;
		POST_OK(&p.a, ops, 2, api);
		EXPECT_WC(&p.a, 80 + i, IBV_WC_RDMA_WRITE, 100);
		EXPECT_WC(&p.a, 90 + i, IBV_WC_FLUSH, 100);
		CHECK_PATTERN(p.b.buf, 100, 30 + i);
	}
	/* The responder refuses a persistent flush, which the region does not allow. */
	ops[1].wr_id = 99;
	ops[1].flush_type = IBV_FLUSH_PERSISTENT;
	post_a(&ops[1]);
	EXPECT_STATUS(&p.a, 99, IBV_WC_REM_INV_REQ_ERR);
	pair_close(&p);
#endif
}

/* ibv_bind_mw binds a type 1 window, with either post interface. */
static void t_bind_mw1(void)
{
	struct ibv_mw_bind bind = {.wr_id = 0x77, .send_flags = IBV_SEND_SIGNALED};
	struct ibv_mw *mw;
	uint32_t first;
	struct op op;

	RC_ONLY();
	open_pair((struct pair_opts){});
	mw = MUST(ibv_alloc_mw(p.pd, IBV_MW_TYPE_1));
	CHECK(mw->pd == p.pd && mw->context == p.ctx);
	EQ(mw->type, IBV_MW_TYPE_1);
	first = mw->rkey;
	bind.bind_info = (struct ibv_mw_bind_info){
		.mr = p.b.mr,
		.addr = (uintptr_t)p.b.buf + 4096,
		.length = 1000,
		.mw_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
	OK(ibv_bind_mw(p.b.qp, mw, &bind));
	EXPECT_WC(&p.b, 0x77, IBV_WC_BIND_MW, 0);
	CHECK(mw->rkey != first);
	EQ(mw->rkey >> 8, first >> 8);

	op = op_a(IBV_WR_RDMA_WRITE, 1, 0, 1000);
	op.rkey = mw->rkey;
	op.remote = bind.bind_info.addr;
	pattern(p.a.buf, 1000, 3);
	post_a(&op);
	expect_sent(&op, 1000);
	CHECK_PATTERN(p.b.buf + 4096, 1000, 3);

	/* A type 1 window cannot be zero based. */
	bind.bind_info.mw_access_flags |= IBV_ACCESS_ZERO_BASED;
	first = mw->rkey;
	EQ(ibv_bind_mw(p.b.qp, mw, &bind), EINVAL);
	EQ(mw->rkey, first);

	/* The window has no remote read access. */
	op.opcode = IBV_WR_RDMA_READ;
	op.wr_id = 2;
	post_a(&op);
	EXPECT_STATUS(&p.a, 2, IBV_WC_REM_ACCESS_ERR);
	OK(ibv_dealloc_mw(mw));
	pair_close(&p);
}

static uint32_t bind_type2(struct ibv_mw *mw, uint64_t id)
{
	struct op bind = {
		.opcode = IBV_WR_BIND_MW,
		.flags = IBV_SEND_SIGNALED,
		.wr_id = id,
		.mw = mw,
		.mw_rkey = ibv_inc_rkey(mw->rkey),
		.bind = {.mr = p.b.mr,
			 .addr = (uintptr_t)p.b.buf + 8192,
			 .length = 2000,
			 .mw_access_flags = IBV_ACCESS_REMOTE_WRITE |
					    IBV_ACCESS_REMOTE_READ},
	};

	POST_OK(&p.b, &bind, 1, api);
	EXPECT_WC(&p.b, id, IBV_WC_BIND_MW, 0);
	return bind.mw_rkey;
}

static void t_bind_mw2(void)
{
	struct ibv_mw *mw;
	struct op op;

	RC_ONLY();
	open_pair((struct pair_opts){});
	mw = MUST(ibv_alloc_mw(p.pd, IBV_MW_TYPE_2));
	EQ(mw->type, IBV_MW_TYPE_2);
	op = op_a(IBV_WR_RDMA_WRITE, 1, 0, 2000);
	op.rkey = bind_type2(mw, 0x78);
	op.remote = (uintptr_t)p.b.buf + 8192;
	pattern(p.a.buf, 2000, 4);
	post_a(&op);
	expect_sent(&op, 2000);
	CHECK_PATTERN(p.b.buf + 8192, 2000, 4);
	/* Outside of the window. */
	op.wr_id = 2;
	op.remote += 1;
	post_a(&op);
	/* The kernel's rxe checks only the bounds of the region, so the second write
	 * ends one byte beyond the region. */
	op.remote = (uintptr_t)p.b.buf + p.b.size - 1999;
	struct ibv_wc wc = POLL(p.a.cq);
	if (wc.status == IBV_WC_SUCCESS) {
		op.wr_id = 3;
		post_a(&op);
		wc = POLL(p.a.cq);
	}
	EQ(wc.status, IBV_WC_REM_ACCESS_ERR);
	OK(ibv_dealloc_mw(mw));
	pair_close(&p);
}

static void t_local_inv(void)
{
	struct ibv_mw *mw;
	struct op op, inv = {.opcode = IBV_WR_LOCAL_INV,
			     .flags = IBV_SEND_SIGNALED,
			     .wr_id = 0x79};

	RC_ONLY();
	open_pair((struct pair_opts){});
	mw = MUST(ibv_alloc_mw(p.pd, IBV_MW_TYPE_2));
	op = op_a(IBV_WR_RDMA_WRITE, 1, 0, 16);
	op.rkey = inv.inv_rkey = bind_type2(mw, 0x78);
	op.remote = (uintptr_t)p.b.buf + 8192;
	post_a(&op);
	expect_sent(&op, 16);
	POST_OK(&p.b, &inv, 1, api);
	EXPECT_WC(&p.b, 0x79, IBV_WC_LOCAL_INV, 0);
	op.wr_id = 2;
	post_a(&op);
	EXPECT_STATUS(&p.a, 2, IBV_WC_REM_ACCESS_ERR);
	OK(ibv_dealloc_mw(mw));
	pair_close(&p);
}

/* Send with invalidate: the completion has the key, which is invalid then. */
static void t_send_inv(void)
{
	struct ibv_mw *mw;
	struct op op, send;

	RC_ONLY();
	open_pair((struct pair_opts){});
	mw = MUST(ibv_alloc_mw(p.pd, IBV_MW_TYPE_2));
	op = op_a(IBV_WR_RDMA_WRITE, 1, 0, 16);
	op.rkey = bind_type2(mw, 0x78);
	op.remote = (uintptr_t)p.b.buf + 8192;
	post_a(&op);
	expect_sent(&op, 16);

	send = op_a(IBV_WR_SEND_WITH_INV, 2, 0, 33);
	send.inv_rkey = op.rkey;
	pattern(p.a.buf, 33, 5);
	post_recv(&p.b, 0x99, 0, 64);
	post_a(&send);
	expect_sent(&send, 33);
	{
		/* rxe writes the kernel's value of the flag, which has another
		 * meaning for users. The key is right. */
		const unsigned kernel_flag = 1 << 2;
		struct ibv_wc wc = POLL(p.b.cq);

		check_wc(__FILE__, __LINE__, &wc, 0x99, IBV_WC_RECV, 33,
			 p.b.qp->qp_num, 0,
			 wc.wc_flags & kernel_flag ? kernel_flag : IBV_WC_WITH_INV, 0);
		EQ(wc.invalidated_rkey, op.rkey);
	}
	CHECK_PATTERN(p.b.buf, 33, 5);

	op.wr_id = 3;
	post_a(&op);
	EXPECT_STATUS(&p.a, 3, IBV_WC_REM_ACCESS_ERR);
	OK(ibv_dealloc_mw(mw));
	pair_close(&p);
}

/* Elements of different lengths, one of them empty, are gathered in order. */
static void t_sge_list(void)
{
	static const uint32_t len[] = {1, 100, 0, 7, 64, 300, 3, 33};
	struct ibv_sge rsge[8];
	uint8_t want[1024];
	struct op op = {.opcode = IBV_WR_SEND,
			.flags = IBV_SEND_SIGNALED,
			.wr_id = 11,
			.list = true,
			.nsge = ARRAY_SIZE(len)};
	uint32_t total = 0;
	size_t i;

	open_pair((struct pair_opts){.sge = 8});
	for (i = 0; i < ARRAY_SIZE(len); i++) {
		op.sge[i] = sge_on(&p.a, 1000 * (8 - i), len[i]);
		pattern(p.a.buf + 1000 * (8 - i), len[i], i);
		pattern(want + total, len[i], i);
		total += len[i];
	}
	/* The receiver scatters the message into two buffers. */
	rsge[0] = sge_on(&p.b, 0, grh_len() + 150);
	rsge[1] = sge_on(&p.b, 5000, 1000);
	OK(try_recv(&p.b, 12, rsge, 2));
	post_a(&op);
	expect_sent(&op, total);
	expect_received(12, IBV_WC_RECV, total, 0, 0);
	CHECK(!memcmp(p.b.buf + grh_len(), want, 150));
	CHECK(!memcmp(p.b.buf + 5000, want + 150, total - 150));
	CHECK_BYTE(p.b.buf + grh_len() + 150, 100, 0xee);
	CHECK_BYTE(p.b.buf + 5000 + total - 150, 100, 0xee);

	/* One element, with the list setter. */
	op.nsge = 1;
	op.wr_id = 13;
	op.sge[0] = sge_on(&p.a, 20000, 77);
	pattern(p.a.buf + 20000, 77, 60);
	post_recv(&p.b, 14, 30000, 200);
	post_a(&op);
	expect_sent(&op, 77);
	expect_received(14, IBV_WC_RECV, 77, 0, 0);
	CHECK_PATTERN(p.b.buf + 30000 + grh_len(), 77, 60);
	pair_close(&p);
}

/* SGE lists of a write and a read. */
static void t_sge_list_rdma(void)
{
	struct op op;

	RC_ONLY();
	open_pair((struct pair_opts){});
	op = op_a(IBV_WR_RDMA_WRITE, 1, 0, 10);
	op.list = true;
	op.nsge = 3;
	op.sge[1] = sge_on(&p.a, 100, 5000);
	op.sge[2] = sge_on(&p.a, 9000, 1);
	pattern(p.a.buf, 10, 1);
	pattern(p.a.buf + 100, 5000, 2);
	pattern(p.a.buf + 9000, 1, 3);
	post_a(&op);
	expect_sent(&op, 5011);
	CHECK_PATTERN(p.b.buf, 10, 1);
	CHECK_PATTERN(p.b.buf + 10, 5000, 2);
	CHECK_PATTERN(p.b.buf + 5010, 1, 3);
	CHECK_BYTE(p.b.buf + 5011, 64, 0xee);

	op.opcode = IBV_WR_RDMA_READ;
	op.wr_id = 2;
	op.sge[0] = sge_on(&p.a, 20000, 2000);
	op.sge[1] = sge_on(&p.a, 30000, 1);
	op.sge[2] = sge_on(&p.a, 40000, 3010);
	pattern(p.b.buf, 2000, 4);
	pattern(p.b.buf + 2000, 1, 5);
	pattern(p.b.buf + 2001, 3010, 6);
	post_a(&op);
	expect_sent(&op, 5011);
	CHECK_PATTERN(p.a.buf + 20000, 2000, 4);
	CHECK_PATTERN(p.a.buf + 30000, 1, 5);
	CHECK_PATTERN(p.a.buf + 40000, 3010, 6);
	CHECK_BYTE(p.a.buf + 22000, 64, 0xee);
	CHECK_BYTE(p.a.buf + 43010, 64, 0xee);
	pair_close(&p);
}

/* The call copies inline data: the buffer may then be modified, and its key is not
 * checked. */
static void t_inline(void)
{
	uint8_t local[256];
	static const uint32_t len[] = {1, 7, 8, 63, 64, 65, 200};
	size_t i;

	open_pair((struct pair_opts){.inl = 200});
	for (i = 0; i < ARRAY_SIZE(len); i++) {
		struct op op = op_a(IBV_WR_SEND, 20 + i, 0, 1);

		op.flags |= IBV_SEND_INLINE;
		op.sge[0] = (struct ibv_sge){(uintptr_t)local, len[i],
					     0xdeadbeef};
		pattern(local, len[i], i);
		memset(p.b.buf, 0xee, 512);
		post_recv(&p.b, 40 + i, 0, 300);
		post_a(&op);
		memset(local, 0x11, sizeof(local));
		expect_sent(&op, len[i]);
		expect_received(40 + i, IBV_WC_RECV, len[i], 0, 0);
		CHECK_PATTERN(p.b.buf + grh_len(), len[i], i);
		CHECK_BYTE(p.b.buf + grh_len() + len[i], 64, 0xee);
	}
	pair_close(&p);
}

static void t_inline_write(void)
{
	uint8_t local[64];
	struct op op;

	NOT_UD();
	open_pair((struct pair_opts){.inl = 64});
	op = op_a(IBV_WR_RDMA_WRITE_WITH_IMM, 20, 0, 1);
	op.flags |= IBV_SEND_INLINE;
	op.sge[0] = (struct ibv_sge){(uintptr_t)local, 64, 0};
	op.remote += 3;
	op.imm = htonl(77);
	pattern(local, 64, 70);
	post_recv(&p.b, 21, 4096, 1);
	post_a(&op);
	memset(local, 0x11, sizeof(local));
	expect_sent(&op, 64);
	expect_received(21, IBV_WC_RECV_RDMA_WITH_IMM, 64, IBV_WC_WITH_IMM, op.imm);
	CHECK_PATTERN(p.b.buf + 3, 64, 70);
	CHECK_BYTE(p.b.buf, 3, 0xee);
	CHECK_BYTE(p.b.buf + 67, 64, 0xee);
	pair_close(&p);
}

static void t_inline_list(void)
{
	uint8_t local[256], want[256];
	static const uint32_t len[] = {3, 1, 50, 0, 30};
	struct op op = {.opcode = IBV_WR_SEND,
			.flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
			.wr_id = 5,
			.list = true,
			.nsge = ARRAY_SIZE(len)};
	uint32_t total = 0;
	size_t i;

	open_pair((struct pair_opts){.inl = 100, .sge = 5});
	for (i = 0; i < ARRAY_SIZE(len); i++) {
		uint8_t *at = local + (i == 2 ? 0 : 60 + 40 * i);

		pattern(at, len[i], i);
		pattern(want + total, len[i], i);
		op.sge[i] = (struct ibv_sge){(uintptr_t)at, len[i], 0};
		total += len[i];
	}
	post_recv(&p.b, 6, 0, 300);
	post_a(&op);
	memset(local, 0x11, sizeof(local));
	expect_sent(&op, total);
	expect_received(6, IBV_WC_RECV, total, 0, 0);
	CHECK(!memcmp(p.b.buf + grh_len(), want, total));
	CHECK_BYTE(p.b.buf + grh_len() + total, 64, 0xee);
	pair_close(&p);
}

/* The man page does not require a flag for the inline setters. */
static void t_inline_noflag(void)
{
	uint8_t local[32];
	struct op op;

	if (api == POST)
		SKIP("ibv_post_send requires the flag");
	open_pair((struct pair_opts){.inl = 64});
	op = op_a(IBV_WR_SEND, 20, 0, 1);
	op.flags |= IBV_SEND_INLINE;
	op.no_inline_flag = true;
	op.sge[0] = (struct ibv_sge){(uintptr_t)local, 32, 0};
	pattern(local, 32, 8);
	post_recv(&p.b, 21, 0, 100);
	post_a(&op);
	memset(local, 0x11, sizeof(local));
	expect_sent(&op, 32);
	expect_received(21, IBV_WC_RECV, 32, 0, 0);
	CHECK_PATTERN(p.b.buf + grh_len(), 32, 8);
	pair_close(&p);
}

static void t_zero(void)
{
	struct op op;
	int i;

	open_pair((struct pair_opts){.inl = 32});
	/* No element; an empty element; empty inline data. */
	for (i = 0; i < 3; i++) {
		op = op_a(IBV_WR_SEND_WITH_IMM, 30 + i, 0, 0);
		op.imm = htonl(i);
		if (i == 0) {
			op.nsge = 0;
			op.list = true;
		} else if (i == 2) {
			op.flags |= IBV_SEND_INLINE;
		}
		post_recv(&p.b, 50 + i, 0, 100);
		post_a(&op);
		expect_sent(&op, 0);
		expect_received(50 + i, IBV_WC_RECV, 0, IBV_WC_WITH_IMM, htonl(i));
		CHECK_BYTE(p.b.buf + grh_len(), 100, 0xee);
	}
	if (type != IBV_QPT_UD) {
		/* A receive without a buffer accepts an empty message. */
		OK(try_recv(&p.b, 60, NULL, 0));
		op = op_a(IBV_WR_RDMA_WRITE_WITH_IMM, 40, 0, 0);
		op.imm = htonl(9);
		post_a(&op);
		expect_sent(&op, 0);
		expect_received(60, IBV_WC_RECV_RDMA_WITH_IMM, 0, IBV_WC_WITH_IMM,
				htonl(9));
	}
	if (type == IBV_QPT_RC) {
		op = op_a(IBV_WR_RDMA_READ, 41, 0, 0);
		post_a(&op);
		expect_sent(&op, 0);
		op = op_a(IBV_WR_RDMA_WRITE, 42, 0, 0);
		op.rkey = 0; /* not checked without data */
		post_a(&op);
		expect_sent(&op, 0);
	}
	pair_close(&p);
}

/* The maximum of elements and inline data, and a large message. */
static void t_max(void)
{
	struct ibv_device_attr dev;
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct ibv_sge rsge[32];
	uint32_t total = 0, big = 4 << 20;
	struct op op;
	int i;

	open_pair((struct pair_opts){
		.sge = 32, .inl = 512, .size = 9 << 20, .wr = 100});
	OK(ibv_query_device(p.ctx, &dev));
	OK(ibv_query_qp(p.a.qp, &attr, IBV_QP_CAP, &init));
	CHECK(init.cap.max_send_sge >= 32 && init.cap.max_inline_data >= 512 &&
	      init.cap.max_send_wr >= 100);

	op = op_a(IBV_WR_SEND, 1, 0, 1);
	op.list = true;
	op.nsge = 32;
	for (i = 0; i < 32; i++) {
		uint32_t len = 1 + i;

		op.sge[i] = sge_on(&p.a, 100 * i, len);
		pattern(p.a.buf + 100 * i, len, i);
		rsge[i] = sge_on(&p.b, 100 * i, i ? 31 + 2 : grh_len() + 10);
		total += len;
	}
	OK(try_recv(&p.b, 2, rsge, 32));
	post_a(&op);
	expect_sent(&op, total);
	expect_received(2, IBV_WC_RECV, total, 0, 0);
	{
		/* Compares the concatenated buffers. */
		uint8_t got[2048], want[2048];
		uint32_t n = 0, m = 0;

		for (i = 0; i < 32; i++) {
			memcpy(got + n, p.b.buf + 100 * i, rsge[i].length);
			n += rsge[i].length;
			pattern(want + m, 1 + i, i);
			m += 1 + i;
		}
		CHECK(!memcmp(got + grh_len(), want, total));
	}

	op = op_a(IBV_WR_SEND, 3, 0, 512);
	op.flags |= IBV_SEND_INLINE;
	pattern(p.a.buf, 512, 66);
	post_recv(&p.b, 4, 0, 1000);
	post_a(&op);
	memset(p.a.buf, 0x11, 512);
	expect_sent(&op, 512);
	expect_received(4, IBV_WC_RECV, 512, 0, 0);
	CHECK_PATTERN(p.b.buf + grh_len(), 512, 66);

	if (type == IBV_QPT_UD)
		big = p.mtu;
	op = op_a(IBV_WR_SEND, 5, 0, big);
	pattern(p.a.buf, big, 67);
	memset(p.b.buf, 0xee, big + 200);
	post_recv(&p.b, 6, 0, big + grh_len());
	post_a(&op);
	expect_sent(&op, big);
	expect_received(6, IBV_WC_RECV, big, 0, 0);
	CHECK_PATTERN(p.b.buf + grh_len(), big, 67);
	CHECK_BYTE(p.b.buf + grh_len() + big, 100, 0xee);
	pair_close(&p);
}

/* Only the last request of a batch is signalled: one completion. */
static void t_unsignalled(void)
{
	struct op ops[20];
	int i, round;

	open_pair((struct pair_opts){});
	for (round = 0; round < 10; round++) {
		for (i = 0; i < 20; i++) {
			ops[i] = op_a(IBV_WR_SEND, 100 * round + i, 100 * i,
				      50 + i);
			ops[i].flags = i == 19 ? IBV_SEND_SIGNALED : 0;
			pattern(p.a.buf + 100 * i, 50 + i, i + round);
			post_recv(&p.b, 500 + i, 200 * i, 150);
		}
		POST_OK(&p.a, ops, 20, api);
		expect_sent(&ops[19], 69);
		for (i = 0; i < 20; i++) {
			expect_received(500 + i, IBV_WC_RECV, 50 + i, 0, 0);
			CHECK_PATTERN(p.b.buf + 200 * i + grh_len(), 50 + i,
				      i + round);
		}
		EXPECT_NO_WC(p.a.cq);
	}
	pair_close(&p);
}

/* With sq_sig_all, requests complete without the flag. */
static void t_sig_all(void)
{
	struct op ops[3];
	int i;

	open_pair((struct pair_opts){.sig_all = true});
	for (i = 0; i < 3; i++) {
		ops[i] = op_a(IBV_WR_SEND, 10 + i, 0, 8);
		ops[i].flags = 0;
		post_recv(&p.b, 20 + i, 0, 64);
	}
	POST_OK(&p.a, ops, 3, api);
	for (i = 0; i < 3; i++) {
		expect_sent(&ops[i], 8);
		expect_received(20 + i, IBV_WC_RECV, 8, 0, 0);
	}
	pair_close(&p);
}

/* Different operations in one batch, each in every slot of the queue in turn. */
static void t_batch(void)
{
	struct op ops[6];
	uint8_t small[40];
	int i, round;

	RC_ONLY();
	/* 15 slots and 6 operations per round: every operation uses every slot. The
	 * timeout is 4 s, because rdma_rxe never retransmits a fenced read (Linux 6.1
	 * to 7.2: rxe_wqe_is_fenced in rxe_req.c makes it wait for itself). */
	open_pair((struct pair_opts){
		.wr = 15, .inl = 64, .sge = 4, .timeout = 20});
	for (round = 0; round < 45; round++) {
		uint64_t *sum = (uint64_t *)(p.b.buf + 65536);

		pattern(p.a.buf, 4096, round);
		pattern(small, sizeof(small), round + 1);
		*sum = 1000 + round;
		ops[0] = op_a(IBV_WR_RDMA_WRITE, 1, 0, 3000);
		ops[1] = op_a(IBV_WR_SEND, 2, 0, 0);
		ops[1].flags |= IBV_SEND_INLINE;
		ops[1].sge[0] = (struct ibv_sge){(uintptr_t)small, 40, 0};
		ops[2] = op_a(IBV_WR_ATOMIC_FETCH_AND_ADD, 3, 70000, 8);
		ops[2].remote = (uintptr_t)sum;
		ops[2].compare_add = 5;
		ops[3] = op_a(IBV_WR_RDMA_READ, 4, 80000, 3000);
		ops[3].flags |= IBV_SEND_FENCE;
		ops[4] = op_a(IBV_WR_SEND_WITH_IMM, 5, 0, 100);
		ops[4].list = true;
		ops[4].nsge = 3;
		ops[4].sge[1] = sge_on(&p.a, 100, 7);
		ops[4].sge[2] = sge_on(&p.a, 107, 1);
		ops[4].imm = htonl(round);
		ops[5] = op_a(IBV_WR_RDMA_WRITE, 6, 0, 0);
		post_recv(&p.b, 100, 100000, 64);
		post_recv(&p.b, 101, 110000, 200);
		POST_OK(&p.a, ops, 6, api);
		expect_sent(&ops[0], 3000);
		expect_sent(&ops[1], 40);
		expect_sent(&ops[2], 8);
		expect_sent(&ops[3], 3000);
		expect_sent(&ops[4], 108);
		expect_sent(&ops[5], 0);
		expect_received(100, IBV_WC_RECV, 40, 0, 0);
		expect_received(101, IBV_WC_RECV, 108, IBV_WC_WITH_IMM, htonl(round));
		CHECK_PATTERN(p.b.buf, 3000, round);
		CHECK_PATTERN(p.a.buf + 80000, 3000, round);
		CHECK_PATTERN(p.b.buf + 100000, 40, round + 1);
		CHECK_PATTERN(p.b.buf + 110000, 108, round);
		EQ(*(uint64_t *)(p.a.buf + 70000), 1000 + round);
		EQ(*(volatile uint64_t *)sum, 1005 + round);
	}
	for (i = 0; i < 2; i++)
		EXPECT_NO_WC(i ? p.a.cq : p.b.cq);
	pair_close(&p);
}

/* Requests between start and abort are not posted, and occupy no slot. */
static void t_abort(void)
{
	struct op op;
	int i;

	if (api == POST)
		SKIP("only ibv_wr_* can abort");
	open_pair((struct pair_opts){.wr = 7});
	for (i = 0; i < 20; i++) {
		post_recv(&p.b, 10, 0, 200);
		ibv_wr_start(p.a.qpx);
		p.a.qpx->wr_id = 0xbad;
		p.a.qpx->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_send(p.a.qpx);
		if (type == IBV_QPT_UD)
			ibv_wr_set_ud_addr(p.a.qpx, p.a.ah, p.a.peer_qpn, QKEY);
		ibv_wr_set_sge(p.a.qpx, p.a.mr->lkey, (uintptr_t)p.a.buf, 99);
		ibv_wr_send_imm(p.a.qpx, 3);
		if (type == IBV_QPT_UD)
			ibv_wr_set_ud_addr(p.a.qpx, p.a.ah, p.a.peer_qpn, QKEY);
		ibv_wr_abort(p.a.qpx);
		if (i < 3) {
			EXPECT_NO_WC(p.a.cq);
			EXPECT_NO_WC(p.b.cq);
		}
		op = op_a(IBV_WR_SEND, 20 + i, 0, 30);
		pattern(p.a.buf, 30, i);
		post_a(&op);
		expect_sent(&op, 30);
		expect_received(10, IBV_WC_RECV, 30, 0, 0);
		CHECK_PATTERN(p.b.buf + grh_len(), 30, i);
	}
	pair_close(&p);
}

static void t_srq(void)
{
	struct ibv_srq_attr attr;
	struct op ops[10];
	int i, round;

	open_pair((struct pair_opts){.srq = true});
	OK(ibv_query_srq(p.b.srq, &attr));
	CHECK(attr.max_wr >= 64);
	EQ(attr.max_sge, 4);
	for (round = 0; round < 20; round++) {
		for (i = 0; i < 10; i++) {
			ops[i] = op_a(IBV_WR_SEND, i, 500 * i, 100 + i);
			pattern(p.a.buf + 500 * i, 100 + i, i + round);
			struct ibv_sge s[2] = {sge_on(&p.b, 500 * i, grh_len() + 60),
					       sge_on(&p.b, 50000 + 500 * i, 400)};
			OK(try_recv(&p.b, 700 + i, s, 2));
		}
		POST_OK(&p.a, ops, 10, api);
		for (i = 0; i < 10; i++) {
			expect_sent(&ops[i], 100 + i);
			expect_received(700 + i, IBV_WC_RECV, 100 + i, 0, 0);
			uint8_t want[200];
			pattern(want, 100 + i, i + round);
			CHECK(!memcmp(p.b.buf + 500 * i + grh_len(), want, 60));
			CHECK(!memcmp(p.b.buf + 50000 + 500 * i, want + 60,
				      40 + i));
		}
	}
	EXPECT_NO_WC(p.b.cq);
	pair_close(&p);
}

static const struct test_case cases[] = {
	{"send", t_send},
	{"send-imm", t_send_imm},
	{"send-inv", t_send_inv},
	{"short", t_short},
	{"write", t_write},
	{"write-imm", t_write_imm},
	{"read", t_read},
	{"cas", t_cas},
	{"faa", t_faa},
	{"atomic-write", t_atomic_write},
	{"flush", t_flush},
	{"bind-mw1", t_bind_mw1},
	{"bind-mw2", t_bind_mw2},
	{"local-inv", t_local_inv},
	{"sge-list", t_sge_list},
	{"sge-list-rdma", t_sge_list_rdma},
	{"inline", t_inline},
	{"inline-write", t_inline_write},
	{"inline-list", t_inline_list},
	{"inline-noflag", t_inline_noflag},
	{"zero", t_zero},
	{"max", t_max},
	{"unsignalled", t_unsignalled},
	{"sig-all", t_sig_all},
	{"batch", t_batch},
	{"abort", t_abort},
	{"srq", t_srq},
};

int main(int argc, char **argv)
{
	if (argc < 4)
		return test_main(1, argv, cases, ARRAY_SIZE(cases), 60);
	type = !strcmp(argv[1], "uc") ? IBV_QPT_UC :
	       !strcmp(argv[1], "ud") ? IBV_QPT_UD :
					IBV_QPT_RC;
	api = !strcmp(argv[2], "wr") ? WR : POST;
	argv[2] = argv[0];
	return test_main(argc - 2, argv + 2, cases, ARRAY_SIZE(cases), 60);
}

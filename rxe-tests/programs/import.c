/* SPDX-License-Identifier: MIT */
/*
 * A device of which two processes share one file: one opens it and sends its
 * descriptor, the other imports the device and objects of the first. No provider of
 * rdma_rxe supports that: the cases are then skipped.
 *
 * In "stock-imports" and "stock-exports" the stock provider serves the second
 * process: it executes this program with the case "import" or "export".
 */
#include "common.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/socket.h>

#define HALF (1 << 20)
#define PAIRS 6	   /* more than have a dedicated doorbell register */
#define ROUNDS 100 /* writes of each pair */

/* What the exporter sends with the descriptor. */
struct offer {
	uint32_t pd, mr, lkey, rkey;
	uint64_t addr, length;
};

static void send_offer(int sock, int fd, const struct offer *offer)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {};
	struct iovec iov = {.iov_base = (void *)offer, .iov_len = sizeof(*offer)};
	struct msghdr msg = {.msg_iov = &iov,
			     .msg_iovlen = 1,
			     .msg_control = &control,
			     .msg_controllen = sizeof(control)};
	struct cmsghdr *cmsg = CMSG_FIRSTHDR(&msg);

	cmsg->cmsg_level = SOL_SOCKET;
	cmsg->cmsg_type = SCM_RIGHTS;
	cmsg->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(cmsg), &fd, sizeof(fd));
	EQ(sendmsg(sock, &msg, 0), sizeof(*offer));
}

static int receive_offer(int sock, struct offer *offer)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control = {};
	struct iovec iov = {.iov_base = offer, .iov_len = sizeof(*offer)};
	struct msghdr msg = {.msg_iov = &iov,
			     .msg_iovlen = 1,
			     .msg_control = &control,
			     .msg_controllen = sizeof(control)};
	int fd;

	EQ(recvmsg(sock, &msg, MSG_WAITALL), sizeof(*offer));
	CHECK(CMSG_FIRSTHDR(&msg));
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&msg)), sizeof(fd));
	return fd;
}

static void signal_peer(int sock)
{
	EQ(write(sock, "x", 1), 1);
}

/* Waits for the other process; returns false if it has exited. */
static bool await_peer(int sock)
{
	char c;

	return read(sock, &c, 1) == 1;
}

static struct ibv_context *import_or_skip(int fd)
{
	struct ibv_context *ctx = ibv_import_device(fd);
	const char *expect = getenv("RXE_EXPECT");
	Dl_info info;

	if (!ctx && errno == EOPNOTSUPP)
		SKIP("this provider does not import devices");
	MUST(ctx);
	CHECK(dladdr((void *)ctx->ops.poll_cq, &info));
	fprintf(stderr, "importing provider %s\n", info.dli_fname);
	if (expect && !strstr(info.dli_fname, expect))
		FAIL("imported by %s, not by %s", info.dli_fname, expect);
	return ctx;
}

/* Two connected ends in one process. */
struct loopback {
	struct end a, b;
};

static const struct pair_opts opts = {
	.type = IBV_QPT_RC, .inl = 128, .size = 1 << 16};

static void loopback_open(struct loopback *h, struct ibv_context *ctx,
			  struct ibv_pd *pd)
{
	union ibv_gid gid;

	OK(ibv_query_gid(ctx, 1, gid_index(ctx), &gid));
	end_open(&h->a, ctx, pd, &opts, false);
	end_open(&h->b, ctx, pd, &opts, false);
	end_connect(&h->a, &opts, h->b.qp->qp_num, &gid);
	end_connect(&h->b, &opts, h->a.qp->qp_num, &gid);
}

/* Expects a write's completion. Not every device reports its byte_len. */
static void expect_write(struct end *e, uint64_t wr_id)
{
	struct ibv_wc wc = POLL(e->cq);

	EQ(wc.status, IBV_WC_SUCCESS);
	EQ(wc.opcode, IBV_WC_RDMA_WRITE);
	EQ(wc.wr_id, wr_id);
	EQ(wc.qp_num, e->qp->qp_num);
}

static void loopback_close(struct loopback *h)
{
	end_close(&h->a);
	end_close(&h->b);
}

/* Inline writes on several queue pairs in turn. Checks data and completions, which a
 * doorbell register shared by two processes would corrupt. */
static void traffic(struct ibv_context *ctx, struct ibv_pd *pd, unsigned seed)
{
	static struct loopback h[PAIRS];
	int i, j;

	for (i = 0; i < PAIRS; i++)
		loopback_open(&h[i], ctx, pd);
	for (j = 0; j < ROUNDS; j++) {
		for (i = 0; i < PAIRS; i++) {
			struct op op = op_on(&h[i].a, IBV_WR_RDMA_WRITE, j,
					     0, 100);

			pattern(h[i].a.buf, 100, seed + i + j);
			op.flags |= IBV_SEND_INLINE;
			op.remote = (uintptr_t)h[i].b.buf + 128 * j;
			op.rkey = h[i].b.mr->rkey;
			POST_OK(&h[i].a, &op, 1, POST);
		}
		for (i = 0; i < PAIRS; i++) {
			expect_write(&h[i].a, j);
			CHECK_PATTERN(h[i].b.buf + 128 * j, 100, seed + i + j);
		}
	}
	for (i = 0; i < PAIRS; i++)
		loopback_close(&h[i]);
}

/* The importer, which has not opened the device. */
static void import_and_write(int sock)
{
	struct ibv_context *ctx;
	struct offer offer;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct loopback h;
	struct op op;

	ctx = import_or_skip(receive_offer(sock, &offer));
	pd = MUST(ibv_import_pd(ctx, offer.pd));
	CHECK(pd->context == ctx);
	EQ(pd->handle, offer.pd);
	NULL_WITH(ibv_import_pd(ctx, 0x7fffffff), ENOENT);
	NULL_WITH(ibv_import_mr(pd, 0x7fffffff), ENOENT);
	mr = MUST(ibv_import_mr(pd, offer.mr));
	CHECK(mr->pd == pd && mr->context == ctx && !mr->addr);
	EQ(mr->handle, offer.mr);
	EQ(mr->lkey, offer.lkey);
	EQ(mr->rkey, offer.rkey);
	EQ(mr->length, offer.length);

	/* From one half of the exporter's memory to the other. */
	loopback_open(&h, ctx, pd);
	op = op_on(&h.a, IBV_WR_RDMA_WRITE, 7, 0, 0);
	op.sge[0] = (struct ibv_sge){
		.addr = offer.addr, .length = HALF, .lkey = mr->lkey};
	op.remote = offer.addr + HALF;
	op.rkey = mr->rkey;
	POST_OK(&h.a, &op, 1, POST);
	expect_write(&h.a, 7);
	loopback_close(&h);

	signal_peer(sock);
	traffic(ctx, pd, 1000);
	/* The objects stay with the exporter. */
	ibv_unimport_mr(mr);
	ibv_unimport_pd(pd);
	OK(ibv_close_device(ctx));
	signal_peer(sock);
}

static void export_and_write(int sock)
{
	struct ibv_context *ctx;
	struct offer offer;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	uint8_t *buf;

	ctx = open_device();
	pd = MUST(ibv_alloc_pd(ctx));
	buf = mmap(NULL, 2 * HALF, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(buf != MAP_FAILED);
	pattern(buf, HALF, 3);
	memset(buf + HALF, 0, HALF);
	mr = MUST(ibv_reg_mr(pd, buf, 2 * HALF,
			     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	offer = (struct offer){.pd = pd->handle,
			       .mr = mr->handle,
			       .lkey = mr->lkey,
			       .rkey = mr->rkey,
			       .addr = (uintptr_t)buf,
			       .length = 2 * HALF};
	send_offer(sock, ctx->cmd_fd, &offer);
	if (await_peer(sock)) {
		CHECK_PATTERN(buf + HALF, HALF, 3);
		traffic(ctx, pd, 2000); /* while the importer does, too */
		CHECK(await_peer(sock));
		traffic(ctx, pd, 3000);
	}
	/* The importer does not prevent destruction. */
	OK(ibv_dereg_mr(mr));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
}

/* Runs `mine` in this process, and in a child process `theirs`, or a case of this
 * program that the stock provider serves. */
static void run_two_processes(void (*mine)(int), void (*theirs)(int), const char *stock)
{
	int socks[2], st;
	char fd[12];
	pid_t pid;

	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, socks));
	fflush(stdout);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid) {
		close(socks[0]);
		if (stock) {
			snprintf(fd, sizeof(fd), "%d", socks[1]);
			setenv("IMPORT_SOCKET", fd, 1);
			setenv("RDMAV_DRIVERS", "mlx5", 1);
			setenv("RXE_EXPECT", "libmlx5", 1);
			unsetenv("LD_PRELOAD");
			execl("/proc/self/exe", "import", stock, NULL);
			FAIL("cannot execute this program");
		}
		test_limit(60);
		theirs(socks[1]);
		_exit(0);
	}
	close(socks[1]);
	mine(socks[0]);
	CHECK(waitpid(pid, &st, 0) == pid);
	if (WIFSIGNALED(st))
		FAIL("the other process was killed by signal %d", WTERMSIG(st));
	if (WEXITSTATUS(st))
		_exit(WEXITSTATUS(st));
}

static int peer_socket(void)
{
	const char *fd = getenv("IMPORT_SOCKET");

	if (!fd)
		SKIP("only other cases run this one");
	return atoi(fd);
}

static void t_import(void)
{
	import_and_write(peer_socket());
}

static void t_export(void)
{
	export_and_write(peer_socket());
}

static void t_write(void)
{
	run_two_processes(export_and_write, import_and_write, NULL);
}

static void t_stock_imports(void)
{
	run_two_processes(export_and_write, NULL, "import");
}

static void t_stock_exports(void)
{
	run_two_processes(import_and_write, NULL, "export");
}

/* Repeated imports of one descriptor leak nothing. */
static void t_reimport(void)
{
	struct ibv_context *ctx = open_device(), *other;
	struct ibv_pd *pd = MUST(ibv_alloc_pd(ctx)), *same;
	unsigned fds = 0;
	int i;

	for (i = 0; i < 200; i++) {
		other = import_or_skip(dup(ctx->cmd_fd));
		same = MUST(ibv_import_pd(other, pd->handle));
		if (i % 20 == 0) {
			struct loopback h;

			loopback_open(&h, other, same);
			loopback_close(&h);
		}
		ibv_unimport_pd(same);
		OK(ibv_close_device(other));
		if (i)
			EQ(count_fds(), fds);
		fds = count_fds();
	}
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
}

/* The importer continues after the exporter has closed the device. */
static void t_exporter_closes(void)
{
	struct ibv_context *ctx = open_device(), *other;
	struct ibv_pd *pd = MUST(ibv_alloc_pd(ctx)), *same;

	other = import_or_skip(dup(ctx->cmd_fd));
	same = MUST(ibv_import_pd(other, pd->handle));
	OK(ibv_close_device(ctx));
	traffic(other, same, 4000);
	/* No other process can deallocate it. */
	OK(ibv_dealloc_pd(same));
	OK(ibv_close_device(other));
}

/* The importer receives the events of its own objects. */
static void t_events(void)
{
	struct ibv_context *ctx = open_device(), *other;
	struct ibv_pd *pd = MUST(ibv_alloc_pd(ctx)), *same;
	struct ibv_async_event event;
	union ibv_gid gid;
	struct end a;

	other = import_or_skip(dup(ctx->cmd_fd));
	same = MUST(ibv_import_pd(other, pd->handle));
	OK(ibv_query_gid(other, 1, gid_index(other), &gid));
	end_open(&a, other, same, &opts, true);
	end_connect(&a, &opts, a.qp->qp_num, &gid);
	qp_to(a.qp, IBV_QPS_ERR);
	CHECK(wait_async(other, &event, 2000));
	EQ(event.event_type, IBV_EVENT_QP_LAST_WQE_REACHED);
	CHECK(event.element.qp == a.qp);
	ibv_ack_async_event(&event);
	CHECK(!fd_readable(ctx->async_fd, 0));
	end_close(&a);
	ibv_unimport_pd(same);
	OK(ibv_close_device(other));
	OK(ibv_dealloc_pd(pd));
	OK(ibv_close_device(ctx));
}

/* Descriptors that are not of an open device. */
static void t_refused(void)
{
	struct ibv_context *ctx = open_device();
	char path[300];
	int fds[2], fd;
	unsigned open_fds;

	import_or_skip(dup(ctx->cmd_fd));
	open_fds = count_fds();
	NULL_WITH(ibv_import_device(-1), EINVAL);
	CHECK(!pipe(fds));
	NULL_WITH(ibv_import_device(fds[0]), EINVAL);
	close(fds[0]);
	close(fds[1]);
	fd = open("/dev/null", O_RDWR);
	CHECK(fd >= 0);
	NULL_WITH(ibv_import_device(fd), ENODEV);
	close(fd);
	/* The device's file without a context; the import closes it. */
	snprintf(path, sizeof(path), "/dev/infiniband/%s",
		 ctx->device->dev_name);
	fd = open(path, O_RDWR);
	CHECK(fd >= 0);
	errno = 0;
	CHECK(!ibv_import_device(fd));
	EQ(errno, EINVAL);
	EQ(count_fds(), open_fds);
	OK(ibv_close_device(ctx));
}

static const struct test_case cases[] = {
	{"write", t_write},
	{"reimport", t_reimport},
	{"exporter-closes", t_exporter_closes},
	{"events", t_events},
	{"refused", t_refused},
	{"stock-imports", t_stock_imports},
	{"stock-exports", t_stock_exports},
	{"import", t_import},
	{"export", t_export},
};

int main(int argc, char **argv)
{
	return test_main(argc, argv, cases, ARRAY_SIZE(cases), 120);
}

/*
 * What parents and children of fork can do with devices. `fork MODE`: the parent makes objects
 * as the mode says, and forks; parent and child use them and objects of their own. Exit status 0
 * if all was as it should be; children print nothing.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "check.h"

extern char **environ;

static struct ibv_context *open_first(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;

	CHECK(list && *list && (context = ibv_open_device(*list)));
	ibv_free_device_list(list);
	return context;
}

/* A queue pair that is connected to itself, with memory to which it writes. */
struct loop {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	char *memory;
};

#define HALF 4096

static struct loop make(struct ibv_pd *pd)
{
	struct ibv_context *context = pd->context;
	struct loop loop = { 0 };
	struct ibv_gid_entry gids[128];
	struct ibv_port_attr port;

	CHECK(!ibv_query_port(context, 1, &port));
	CHECK(ibv_query_gid_table(context, gids, 128, 0) > 0);
	loop.memory = mmap(NULL, 2 * HALF, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			   -1, 0);
	CHECK(loop.memory != MAP_FAILED);
	CHECK((loop.cq = ibv_create_cq(context, 16, NULL, NULL, 0)));
	loop.mr = ibv_reg_mr(pd, loop.memory, 2 * HALF,
			     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	loop.qp = ibv_create_qp(pd, &(struct ibv_qp_init_attr){
		.send_cq = loop.cq, .recv_cq = loop.cq, .qp_type = IBV_QPT_RC,
		.cap = { 8, 8, 1, 1 } });
	CHECK(loop.mr && loop.qp);
	struct ibv_qp_attr at = {
		.qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};
	CHECK(!ibv_modify_qp(loop.qp, &at, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			     IBV_QP_ACCESS_FLAGS));
	at = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
		.dest_qp_num = loop.qp->qp_num, .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .dlid = port.lid,
			     .grh = { .dgid = gids[0].gid, .sgid_index = gids[0].gid_index,
				      .hop_limit = 1 } },
	};
	CHECK(!ibv_modify_qp(loop.qp, &at, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			     IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			     IBV_QP_MIN_RNR_TIMER));
	at = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7,
				   .rnr_retry = 7, .max_rd_atomic = 1 };
	CHECK(!ibv_modify_qp(loop.qp, &at, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			     IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
	return loop;
}

/* Posts a write; returns what a poll returns, and the data if it was done. */
static int write_once(struct loop *loop, int value)
{
	struct ibv_sge sge = { (uintptr_t)loop->memory, HALF, loop->mr->lkey };
	struct ibv_send_wr *bad, wr = {
		.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { (uintptr_t)loop->memory + HALF, loop->mr->rkey },
	};
	struct ibv_wc wc;
	int got;

	memset(loop->memory, value, HALF);
	CHECK(!ibv_post_send(loop->qp, &wr, &bad));
	while (!(got = ibv_poll_cq(loop->cq, 1, &wc)))
		;
	CHECK(got < 0 || (!wc.status && !memcmp(loop->memory, loop->memory + HALF, HALF)));
	return got;
}

static void destroy(struct loop *loop)
{
	CHECK(!ibv_destroy_qp(loop->qp) && !ibv_dereg_mr(loop->mr) && !ibv_destroy_cq(loop->cq));
}

/* Makes queues on a protection domain, uses and destroys them. */
static void use(struct ibv_pd *pd)
{
	struct loop loop = make(pd);

	for (int n = 1; n <= 20; n++)
		CHECK(write_once(&loop, n) == 1);
	destroy(&loop);
}

/* Uses a device of its own. */
static void own(void)
{
	struct ibv_context *context = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(context);

	CHECK(pd);
	use(pd);
	CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context));
}

static void waits_for(pid_t pid)
{
	int status;

	CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
}

/* Uses what its parent has opened: a context with a protection domain. */
static void inherits(struct ibv_pd *pd)
{
	struct ibv_pd *more;
	struct ibv_async_event event;
	struct ibv_comp_channel *channel;

	use(pd);
	CHECK((more = ibv_alloc_pd(pd->context)) && more->handle != pd->handle);
	use(more);
	CHECK(!ibv_dealloc_pd(more));
	CHECK((channel = ibv_create_comp_channel(pd->context)));
	CHECK(!ibv_destroy_comp_channel(channel));
	/* No event. */
	CHECK(!fcntl(pd->context->async_fd, F_SETFL, O_NONBLOCK));
	CHECK(ibv_get_async_event(pd->context, &event) && errno == EAGAIN);
}

/* What its parent has made of queues is not the child's. */
static void refused(struct ibv_pd *pd, struct loop *loop)
{
	char memory[64];
	struct ibv_wc wc;
	int got;

	errno = 0;
	CHECK(!ibv_reg_mr(pd, memory, sizeof memory, 0) && errno == EIO);
	CHECK(!ibv_alloc_pd(pd->context) && errno == EIO);
	while (!(got = ibv_poll_cq(loop->cq, 1, &wc)))
		;
	CHECK(got < 0 && write_once(loop, 1) < 0);
	own();
	CHECK(write_once(loop, 1) < 0);
	CHECK(ibv_destroy_qp(loop->qp) == EIO);
}

static volatile int works_now, stops;

static void *works(void *context)
{
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct loop loop;

	CHECK(pd);
	loop = make(pd);
	for (int n = 1; !stops; n++) {
		CHECK(write_once(&loop, n) == 1);
		works_now = 1;
	}
	destroy(&loop);
	CHECK(!ibv_dealloc_pd(pd));
	return NULL;
}

static void runs(const char *path, char *const *arguments)
{
	pid_t pid;

	CHECK(!posix_spawn(&pid, path, NULL, NULL, arguments, environ));
	waits_for(pid);
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "use";
	char *again[] = { argv[0], "use", NULL };
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct loop loop;
	pthread_t thread;
	pid_t pid, pids[4];

#define IS(name) (!strcmp(mode, name))
	/* The numbers of its objects are not reused. */
	context = open_first();
	CHECK(ibv_alloc_pd(context) && (pd = ibv_alloc_pd(context)) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	context = open_first();
	CHECK((pd = ibv_alloc_pd(context)));
	if (IS("use")) {
		use(pd);
	} else if (IS("context")) {
		/* Both, and children of children; as a daemon does. */
		if (!(pid = fork())) {
			inherits(pd);
			if (!(pid = fork())) {
				inherits(pd);
				_exit(0);
			}
			waits_for(pid);
			inherits(pd);
			_exit(0);
		}
		inherits(pd);
		waits_for(pid);
		if (!(pid = fork())) {
			/* Uses nothing itself. */
			if (!(pid = fork())) {
				inherits(pd);
				own();
				_exit(0);
			}
			waits_for(pid);
			_exit(0);
		}
		waits_for(pid);
		/* A device of its own first. */
		if (!(pid = fork())) {
			own();
			inherits(pd);
			CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context));
			own();
			_exit(0);
		}
		waits_for(pid);
	} else if (IS("daemon")) {
		/* The parent ends, so that a pipe tells of the end. */
		int ends[2];
		char byte;

		CHECK(!pipe(ends));
		if (!(pid = fork())) {
			CHECK(!daemon(1, 1));
			inherits(pd);
			CHECK(write(ends[1], "w", 1) == 1);
			_exit(0);
		}
		waits_for(pid);
		close(ends[1]);
		CHECK(read(ends[0], &byte, 1) == 1);
	} else if (IS("queues")) {
		loop = make(pd);
		CHECK(write_once(&loop, 1) == 1);
		for (int n = 0; n < 2; n++) {
			if (!(pid = fork())) {
				refused(pd, &loop);
				_exit(0);
			}
			CHECK(write_once(&loop, 2) == 1);
			waits_for(pid);
			CHECK(write_once(&loop, 3) == 1);
		}
		destroy(&loop);
		/* Without the queues it is inherited again. */
		if (!(pid = fork())) {
			inherits(pd);
			_exit(0);
		}
		waits_for(pid);
	} else if (IS("workers")) {
		/* A server whose workers open the device, and use the parent's. */
		for (int n = 0; n < 4; n++)
			if (!(pids[n] = fork())) {
				own();
				inherits(pd);
				_exit(0);
			}
		use(pd);
		for (int n = 0; n < 4; n++)
			waits_for(pids[n]);
	} else if (IS("threads")) {
		CHECK(!pthread_create(&thread, NULL, works, open_first()));
		while (!works_now)
			;
		for (int n = 0; n < 10; n++) {
			if (!(pid = fork())) {
				inherits(pd);
				_exit(0);
			}
			waits_for(pid);
		}
		stops = 1;
		CHECK(!pthread_join(thread, NULL));
	} else if (IS("spawn")) {
		runs("/proc/self/exe", again);
		CHECK(!system("true"));
	} else if (IS("vfork")) {
		if (!(pid = vfork())) {
			execv("/proc/self/exe", again);
			_exit(1);
		}
		waits_for(pid);
	} else if (IS("fork-exec")) {
		if (!(pid = fork())) {
			execv("/proc/self/exe", again);
			_exit(1);
		}
		waits_for(pid);
	} else if (IS("exec")) {
		loop = make(pd);
		CHECK(write_once(&loop, 1) == 1);
		execv("/proc/self/exe", again);
		return 1;
	} else {
		return 2;
	}
	use(pd);
	CHECK(!ibv_dealloc_pd(pd) && !ibv_close_device(context));
	return 0;
}

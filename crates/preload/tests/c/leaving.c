/*
 * `leaving WHAT HOW ROUNDS`: a process sends a request to another one, which ends as soon as
 * it knows the result. The sender gets the right answer nevertheless.
 *
 * WHAT is `success`, `length` (the receive is too short) or `access` (a write to memory
 * without the right; its responder gets an event). HOW the process ends is `exit` for
 * _exit(2), `group` for the system call itself, or `kill`.
 */
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "check.h"
#include "loopback.h"

enum { SIZE = 64 };

struct side {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

struct address {
	uint64_t memory;
	uint32_t qpn, rkey;
};

static char memory[SIZE];

static void open_side(struct side *it)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);

	CHECK(devices && *devices && (it->context = ibv_open_device(*devices)));
	CHECK(it->pd = ibv_alloc_pd(it->context));
	CHECK(it->mr = ibv_reg_mr(it->pd, memory, SIZE, IBV_ACCESS_LOCAL_WRITE));
	CHECK(it->cq = ibv_create_cq(it->context, 4, NULL, NULL, 0));
	struct ibv_qp_init_attr init = {
		.send_cq = it->cq,
		.recv_cq = it->cq,
		.cap = { 2, 2, 1, 1 },
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
	};
	CHECK(it->qp = ibv_create_qp(it->pd, &init));
}

/* Tells the other process the address of this one, and connects to it. */
static struct address meet(struct side *it, int fd)
{
	struct address own = { (uintptr_t)memory, it->qp->qp_num, it->mr->rkey }, peer;
	struct ibv_qp_attr attr = {
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
		.timeout = 14,
		.retry_cnt = 1,
		.rnr_retry = 7,
		.min_rnr_timer = 1,
	};

	CHECK(write(fd, &own, sizeof(own)) == sizeof(own));
	CHECK(read(fd, &peer, sizeof(peer)) == sizeof(peer));
	connect_to(it->qp, peer.qpn, attr);
	return peer;
}

/* Waits until both processes are ready. */
static void wait_for_peer(int fd)
{
	char ready = 0;

	CHECK(write(fd, &ready, 1) == 1 && read(fd, &ready, 1) == 1);
}

static void respond(const char *what, const char *how, int fd)
{
	struct side side;
	struct ibv_wc wc;

	open_side(&side);
	struct ibv_sge sge = {
		.addr = (uintptr_t)memory,
		.length = !strcmp(what, "length") ? SIZE / 2 : SIZE,
		.lkey = side.mr->lkey,
	};
	struct ibv_recv_wr receive = { .sg_list = &sge, .num_sge = 1 }, *bad;
	meet(&side, fd);
	CHECK(!ibv_post_recv(side.qp, &receive, &bad));
	wait_for_peer(fd);
	if (!strcmp(what, "access")) {
		struct ibv_async_event event;
		CHECK(!ibv_get_async_event(side.context, &event));
	} else {
		while (!ibv_poll_cq(side.cq, 1, &wc))
			;
	}
	if (!strcmp(how, "group"))
		syscall(SYS_exit_group, 0);
	if (!strcmp(how, "kill"))
		kill(getpid(), SIGKILL);
	_exit(0);
}

static void request(const char *what, int fd)
{
	int writes = !strcmp(what, "access");
	enum ibv_wc_status expected = writes ? IBV_WC_REM_ACCESS_ERR :
		!strcmp(what, "length") ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_SUCCESS;
	struct side side;
	struct ibv_wc wc;

	open_side(&side);
	struct ibv_sge sge = {
		.addr = (uintptr_t)memory,
		.length = SIZE,
		.lkey = side.mr->lkey,
	};
	struct address peer = meet(&side, fd);
	struct ibv_send_wr send = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = writes ? IBV_WR_RDMA_WRITE : IBV_WR_SEND,
		.wr.rdma = { .remote_addr = peer.memory, .rkey = peer.rkey },
	}, *bad;
	wait_for_peer(fd);
	CHECK(!ibv_post_send(side.qp, &send, &bad));
	while (!ibv_poll_cq(side.cq, 1, &wc))
		;
	if (wc.status != expected)
		fprintf(stderr, "%s\n", ibv_wc_status_str(wc.status));
	_exit(wc.status != expected);
}

int main(int argc, char **argv)
{
	int wrong = 0, status, pair[2];

	CHECK(argc == 4);
	for (int round = atoi(argv[3]); round > 0; round--) {
		CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
		pid_t responder = fork();
		CHECK(responder >= 0);
		if (!responder)
			respond(argv[1], argv[2], pair[0]);
		pid_t requester = fork();
		CHECK(requester >= 0);
		if (!requester)
			request(argv[1], pair[1]);
		CHECK(waitpid(requester, &status, 0) == requester);
		wrong += status != 0;
		CHECK(waitpid(responder, &status, 0) == responder);
		close(pair[0]);
		close(pair[1]);
	}
	printf("%d wrong\n", wrong);
	return wrong != 0;
}

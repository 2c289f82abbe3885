/*
 * Posts a list of work requests that leads back to its beginning, and posts and polls while
 * signal handlers wait, poll another queue, and fork: children that end, and children that
 * open a device. Exit status 0 if each was done or refused.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "loopback.h"

#define DEPTH 64
#define SECONDS 1
#define CHILD_SECONDS 60

static char memory[4096] __attribute__((aligned(4096)));
static volatile sig_atomic_t signals, children;
static struct ibv_cq *other;
static int waits;

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec * 1e-9;
}

/* The lists of libibverbs are free: the interrupted thread posts and polls. */
static int has_a_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;

	return context && ibv_alloc_pd(context);
}

static void forks(void)
{
	pid_t child = fork();

	if (child == 0) {
		struct itimerval none = { 0 };

		signal(SIGALRM, SIG_DFL);
		setitimer(ITIMER_REAL, &none, NULL);
		alarm(CHILD_SECONDS);
		_exit(children % 4 == 0 && !has_a_device());
	}
	if (child > 0)
		children++;
}

static void on_signal(int number)
{
	int saved = errno;
	struct epoll_event event;
	struct ibv_wc wc;

	(void)number;
	switch (signals++ % 4) {
	case 0:
		poll(NULL, 0, 1);
		break;
	case 1:
		epoll_wait(waits, &event, 1, 1);
		break;
	case 2:
		ibv_poll_cq(other, 1, &wc);
		break;
	default:
		forks();
	}
	errno = saved;
}

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { DEPTH, DEPTH, 1, 1 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	CHECK(qp);
	connect_to_itself(qp, (struct ibv_qp_attr){
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE, .timeout = 14, .retry_cnt = 7,
		.rnr_retry = 7, .min_rnr_timer = 1 });
	return qp;
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && list[0] ? ibv_open_device(list[0]) : NULL;
	struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
	struct ibv_cq *cq = context ? ibv_create_cq(context, 4 * DEPTH, NULL, NULL, 0) : NULL;
	struct itimerval often = { { 0, 10000 }, { 0, 10000 } };
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
	struct ibv_sge sge = { (uintptr_t)memory, 64, 0 };
	struct ibv_send_wr *bad, send = { .sg_list = &sge, .num_sge = 1,
		.opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED };
	struct ibv_recv_wr *bad_receive, receive = { .sg_list = &sge, .num_sge = 1 };
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	struct ibv_wc wc;
	double end;
	int got, status, failed = 0;
	long done = 0;

	CHECK(pd && cq);
	other = ibv_create_cq(context, 4, NULL, NULL, 0);
	waits = epoll_create1(0);
	CHECK(other && waits >= 0);
	mr = ibv_reg_mr(pd, memory, sizeof memory,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(mr);
	sge.lkey = mr->lkey;
	send.wr.rdma.remote_addr = (uintptr_t)memory + 2048;
	send.wr.rdma.rkey = mr->rkey;

	qp = create_qp(pd, cq);
	send.next = &send;
	receive.next = &receive;
	CHECK(ibv_post_recv(qp, &receive, &bad_receive) && bad_receive == &receive);
	CHECK(ibv_post_send(qp, &send, &bad) && bad == &send);
	send.next = NULL;
	CHECK(!ibv_destroy_qp(qp));
	while (ibv_poll_cq(cq, 1, &wc) > 0)
		;

	qp = create_qp(pd, cq);
	CHECK(!sigaction(SIGALRM, &action, NULL));
	CHECK(!setitimer(ITIMER_REAL, &often, NULL));
	for (end = now() + SECONDS; now() < end || signals < 40; done++) {
		CHECK(!ibv_post_send(qp, &send, &bad));
		while (!(got = ibv_poll_cq(cq, 1, &wc)))
			;
		CHECK(got == 1 && wc.status == IBV_WC_SUCCESS);
	}
	CHECK(!setitimer(ITIMER_REAL, &(struct itimerval){ 0 }, NULL));
	for (pid_t child; (child = wait(&status)) > 0 || errno == EINTR;)
		failed += child > 0 && status != 0;
	printf("%ld writes, %d children, %d failed\n", done, (int)children, failed);
	CHECK(children > 0 && failed == 0);
	return 0;
}

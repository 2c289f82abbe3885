/*
 * Signal handlers and masks of a program with a device: doorbells are faults of which they
 * must not notice anything. `handlers MODE` fails if they do.
 */
#define _GNU_SOURCE
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>

#include "check.h"
#include "loopback.h"

static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_qp *qp, *in_handler;
static struct ibv_mr *mr;
static char buffer[4096];
static sigjmp_buf left;
static volatile int handled, opened;

static void set_up(void)
{
	struct ibv_qp_attr timers = { .timeout = 18, .retry_cnt = 7, .rnr_retry = 7,
				      .min_rnr_timer = 1 };
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 1, 1, 0 } };
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;
	struct ibv_pd *pd;

	CHECK(list && list[0]);
	CHECK((context = ibv_open_device(list[0])));
	CHECK((pd = ibv_alloc_pd(context)));
	CHECK((mr = ibv_reg_mr(pd, buffer, sizeof(buffer), IBV_ACCESS_LOCAL_WRITE)));
	CHECK((channel = ibv_create_comp_channel(context)));
	CHECK((cq = ibv_create_cq(context, 16, NULL, channel, 0)));
	init.send_cq = init.recv_cq = cq;
	CHECK((qp = ibv_create_qp(pd, &init)));
	connect_to_itself(qp, timers);
}

/* A message, after the device has gone to sleep. */
static void exchange(void)
{
	struct ibv_sge sge = { (uintptr_t)buffer, 64, mr->lkey };
	struct ibv_recv_wr receive = { .sg_list = &sge, .num_sge = 1 }, *bad_receive;
	struct ibv_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				    .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct pollfd event = { .fd = channel->fd, .events = POLLIN };
	struct ibv_cq *of;
	struct ibv_wc wc;
	void *unused;
	int found = 0;

	CHECK(!ibv_post_recv(qp, &receive, &bad_receive));
	CHECK(!ibv_req_notify_cq(cq, 0));
	usleep(100000);
	CHECK(!ibv_post_send(qp, &send, &bad));
	CHECK(poll(&event, 1, 20000) == 1);
	CHECK(!ibv_get_cq_event(channel, &of, &unused));
	ibv_ack_cq_events(of, 1);
	while (found < 2) {
		int count = ibv_poll_cq(cq, 1, &wc);

		CHECK(count >= 0 && (!count || wc.status == IBV_WC_SUCCESS));
		found += count;
	}
}

static void *exchange_in_thread(void *unused)
{
	exchange();
	return unused;
}

static void fault(void)
{
	*(volatile int *)16 = 1;
}

static void jump(int number)
{
	handled++;
	siglongjmp(left, number);
}

static void exchange_and_jump(int number)
{
	exchange();
	jump(number);
}

static void fault_again(int number)
{
	(void)!write(STDERR_FILENO, "again\n", 6);
	fault();
	_exit(number);
}

static void count(int number)
{
	(void)number;
	handled++;
}

static void open_file(int number)
{
	if (opened > 0)
		CHECK(!close(opened));
	opened = open("/dev/null", O_RDONLY);
	count(number);
}

/* Posts a receive, also to a queue that is full. */
static void post_receive(struct ibv_qp *to)
{
	struct ibv_sge sge = { (uintptr_t)buffer, 64, mr->lkey };
	struct ibv_recv_wr receive = { .sg_list = &sge, .num_sge = 1 }, *bad;

	(void)!ibv_post_recv(to, &receive, &bad);
}

static void post_in_handler(int number)
{
	post_receive(in_handler);
	count(number);
}

/* Faults are handled, by a handler that jumps, any number of times; doorbells are not. */
static void faults(struct sigaction action, int restores_mask, int times)
{
	CHECK(!sigaction(SIGSEGV, &action, NULL));
	for (int n = 1; n <= times; n++) {
		if (!sigsetjmp(left, restores_mask))
			fault();
		CHECK(handled == n);
		if (n == 1 || n == times)
			exchange();
	}
}

static int is(const char *mode, const char *name)
{
	return !strcmp(mode, name);
}

int main(int argc, char **argv)
{
	const char *mode = argc == 2 ? argv[1] : "";
	struct sigaction action = { .sa_handler = jump }, before;

	set_up();
	if (is(mode, "jump")) {
		faults(action, 1, 100);
	} else if (is(mode, "jump_unmasked")) {
		faults(action, 0, 1);
		exchange();
	} else if (is(mode, "nodefer")) {
		action.sa_flags = SA_NODEFER;
		faults(action, 0, 100);
	} else if (is(mode, "altstack")) {
		stack_t stack = { .ss_sp = malloc(1 << 16), .ss_size = 1 << 16 };

		CHECK(!sigaltstack(&stack, NULL));
		action.sa_flags = SA_ONSTACK;
		faults(action, 1, 100);
	} else if (is(mode, "inside")) {
		action.sa_handler = exchange_and_jump;
		faults(action, 1, 2);
	} else if (is(mode, "nested")) {
		/* A handler that faults ends the process. */
		int child, status;

		CHECK((child = fork()) >= 0);
		if (!child) {
			struct rlimit none = { 0, 0 };

			CHECK(!setrlimit(RLIMIT_CORE, &none));
			set_up();
			signal(SIGSEGV, fault_again);
			fault();
			_exit(0);
		}
		CHECK(waitpid(child, &status, 0) == child);
		CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
	} else if (is(mode, "sysv")) {
		CHECK(sysv_signal(SIGSEGV, count) == SIG_DFL);
		CHECK(sysv_signal(SIGUSR1, count) == SIG_DFL);
		exchange();
		CHECK(!handled && !raise(SIGUSR1) && handled == 1);
		CHECK(sysv_signal(SIGSEGV, SIG_DFL) == count);
		CHECK(sysv_signal(SIGUSR1, SIG_DFL) == SIG_DFL);
	} else if (is(mode, "sigset")) {
		CHECK(sigset(SIGSEGV, count) == SIG_DFL && sigset(SIGSEGV, SIG_HOLD) == count);
		CHECK(sigset(SIGUSR1, count) == SIG_DFL && sigset(SIGUSR1, count) == count);
		exchange();
		CHECK(!handled);
	} else if (is(mode, "sighold")) {
		CHECK(!sighold(SIGSEGV));
		exchange();
	} else if (is(mode, "sigblock")) {
		sigblock(~0);
		exchange();
	} else if (is(mode, "sigsetmask")) {
		sigsetmask(~0);
		exchange();
	} else if (is(mode, "attribute")) {
		pthread_attr_t attributes;
		pthread_t thread;
		sigset_t all;

		sigfillset(&all);
		CHECK(!pthread_attr_init(&attributes));
		CHECK(!pthread_attr_setsigmask_np(&attributes, &all));
		CHECK(!pthread_create(&thread, &attributes, exchange_in_thread, NULL));
		CHECK(!pthread_join(thread, NULL));
	} else if (is(mode, "opens")) {
		/* A handler that interrupts the device opens descriptors of the program. */
		struct itimerval often = { { 0, 1000 }, { 0, 1000 } }, never = { 0 };
		struct ibv_wc wc;

		signal(SIGALRM, open_file);
		CHECK(!setitimer(ITIMER_REAL, &often, NULL));
		while (handled < 300)
			CHECK(!ibv_poll_cq(cq, 1, &wc));
		CHECK(!setitimer(ITIMER_REAL, &never, NULL));
		CHECK(opened > 0 && opened < 64 && !close(opened));
	} else if (is(mode, "posts")) {
		/* A handler posts, whatever it interrupts: calls that post, or malloc. */
		struct itimerval often = { { 0, 500 }, { 0, 500 } }, never = { 0 };
		struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };
		struct ibv_qp_attr init = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
		struct ibv_qp_init_attr ask = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
						.cap = { 4, 4, 1, 1, 0 } };
		struct ibv_qp *other = ibv_create_qp(qp->pd, &ask);
		const int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				 IBV_QP_ACCESS_FLAGS;

		/* The provider locks the completion queue of a full queue. */
		ask.send_cq = ask.recv_cq = ibv_create_cq(qp->context, 16, NULL, NULL, 0);
		CHECK(other && ask.send_cq && (in_handler = ibv_create_qp(qp->pd, &ask)));
		CHECK(!ibv_modify_qp(in_handler, &init, mask));
		signal(SIGALRM, post_in_handler);
		CHECK(!setitimer(ITIMER_REAL, &often, NULL));
		while (handled < 300) {
			CHECK(!ibv_modify_qp(other, &reset, IBV_QP_STATE));
			CHECK(!ibv_modify_qp(other, &init, mask));
			for (int n = 0; n < 50; n++) {
				post_receive(other);
				free(malloc(n * 100));
			}
		}
		CHECK(!setitimer(ITIMER_REAL, &never, NULL));
	} else if (is(mode, "actions")) {
		action.sa_handler = count;
		CHECK(!sigaction(SIGUSR1, &action, &before) && before.sa_handler == SIG_DFL);
		CHECK(!sigaction(SIGUSR1, NULL, &before) && before.sa_handler == count);
		CHECK(signal(SIGUSR1, SIG_IGN) == count && signal(SIGUSR1, jump) == SIG_IGN);
		CHECK(!sigaction(SIGUSR1, NULL, &before) && before.sa_handler == jump);
		CHECK(before.sa_flags & SA_RESTART);
		CHECK(sigaction(SIGKILL, &action, NULL) == -1 && errno == EINVAL);
		if (!sigsetjmp(left, 1))
			raise(SIGUSR1);
		CHECK(handled == 1);
	} else if (is(mode, "limit")) {
		/* As many descriptors as the program may pass to poll(2). */
		struct pollfd one = { .fd = -1 };
		struct rlimit limit = { 1, 4096 };


		CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
		CHECK(!poll(&one, 1, 10));
	} else {
		fprintf(stderr, "usage: handlers MODE\n");
		return 2;
	}
	return 0;
}

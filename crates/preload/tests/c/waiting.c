/*
 * What waiting for a device costs a program. `waiting MODE` prints one line a
 * measurement, in microseconds:
 *   gaps [WORK ...]           work between two empty polls of 1, 2 and 8 CQs
 *   event DELAY_MS ROUNDS     from a post of one thread, after DELAY_MS without
 *                             activity, to the event that another one waits for
 *   exchange poll|cursor|events|epoll ROUNDS
 *                             one way between two processes; with how often a
 *                             process sleeps for each message that it receives
 *   tcp ROUNDS                the same by a TCP connection over loopback
 *   blocked                   nothing: posts with all signals blocked
 *   cancel                    nothing: ends threads that wait for an event
 *   signals                   nothing: signals arrive while a thread waits
 *   left cancel|jump          nothing: threads leave their waits, others get messages
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>

#include "check.h"
#include "loopback.h"

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static char buffer[4096] __attribute__((aligned(4096)));

static double now(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static void open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);

	CHECK(list && list[0]);
	CHECK((context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	CHECK((pd = ibv_alloc_pd(context)));
	CHECK((mr = ibv_reg_mr(pd, buffer, sizeof(buffer), IBV_ACCESS_LOCAL_WRITE)));
}

static struct ibv_qp *create_qp(struct ibv_cq *cq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 1,
			 .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	CHECK(qp);
	return qp;
}

static const struct ibv_qp_attr timers = { .timeout = 18, .retry_cnt = 7, .rnr_retry = 7,
					   .min_rnr_timer = 1 };

static void post_recv(struct ibv_qp *qp)
{
	struct ibv_sge sge = { (uintptr_t)buffer, 64, mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	CHECK(!ibv_post_recv(qp, &wr, &bad));
}

static void post_send(struct ibv_qp *qp)
{
	struct ibv_sge sge = { (uintptr_t)buffer + 64, 64, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;

	CHECK(!ibv_post_send(qp, &wr, &bad));
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* Works for some microseconds of the thread's processor time. */
static void work(double us)
{
	double end = now(CLOCK_THREAD_CPUTIME_ID) + us;

	while (us != 0 && now(CLOCK_THREAD_CPUTIME_ID) < end)
		;
}

static double items(double us, struct ibv_cq **cqs, int count, int rounds)
{
	double began = now(CLOCK_MONOTONIC);
	struct ibv_wc wc;

	for (int n = 0; n < rounds; n++) {
		work(us);
		for (int i = 0; i < count; i++)
			CHECK(ibv_poll_cq(cqs[i], 1, &wc) == 0);
	}
	return (now(CLOCK_MONOTONIC) - began) / rounds;
}

static void gaps(int argc, char **argv)
{
	static const int counts[] = { 1, 2, 8 };
	struct ibv_cq *cqs[8];

	open_device();
	for (int n = 0; n < 8; n++)
		CHECK((cqs[n] = ibv_create_cq(context, 16, NULL, NULL, 0)));
	/* A device in use. */
	connect_to_itself(create_qp(cqs[0]), timers);
	for (int n = 0; n < argc; n++) {
		double us = atof(argv[n]);
		int rounds = 40000 / (us + 20);

		for (int c = 0; c < 3; c++) {
			double alone = items(us, cqs, 0, rounds);
			double polled = items(us, cqs, counts[c], rounds);

			printf("work %.0f cqs %d alone %.2f polled %.2f a_poll %.2f ratio %.2f\n",
			       us, counts[c], alone, polled, (polled - alone) / counts[c],
			       alone > 0.1 ? polled / alone : 0);
			fflush(stdout);
		}
	}
}

static struct ibv_comp_channel *channel;
static sem_t waits;
static double posted, *late;
static int rounds;

static void *wait_for_events(void *cq)
{
	for (int n = 0; n < rounds; n++) {
		struct ibv_cq *of;
		struct ibv_wc wc;
		void *unused;

		CHECK(!ibv_req_notify_cq(cq, 0));
		sem_post(&waits);
		CHECK(!ibv_get_cq_event(channel, &of, &unused));
		late[n] = now(CLOCK_MONOTONIC) - posted;
		ibv_ack_cq_events(of, 1);
		while (ibv_poll_cq(cq, 1, &wc))
			CHECK(wc.status == IBV_WC_SUCCESS);
	}
	return NULL;
}

/* Both completions go to one queue, but the waiting thread needs only one event. */
static void events(int delay_ms)
{
	struct ibv_cq *cq, *receives;
	struct ibv_qp_init_attr init;
	struct ibv_qp *qp;
	pthread_t thread;

	open_device();
	CHECK((channel = ibv_create_comp_channel(context)));
	CHECK((cq = ibv_create_cq(context, 1024, NULL, channel, 0)));
	CHECK((receives = ibv_create_cq(context, 1024, NULL, NULL, 0)));
	init = (struct ibv_qp_init_attr) {
		.send_cq = cq, .recv_cq = receives, .qp_type = IBV_QPT_RC,
		.cap = { 64, 1024, 1, 1, 0 },
	};
	CHECK((qp = ibv_create_qp(pd, &init)));
	connect_to_itself(qp, timers);
	for (int n = 0; n < rounds; n++)
		post_recv(qp);
	CHECK((late = calloc(rounds, sizeof(*late))));
	sem_init(&waits, 0, 0);
	CHECK(!pthread_create(&thread, NULL, wait_for_events, cq));
	for (int n = 0; n < rounds; n++) {
		sem_wait(&waits);
		usleep(1000 * delay_ms);
		posted = now(CLOCK_MONOTONIC);
		post_send(qp);
	}
	CHECK(!pthread_join(thread, NULL));
	qsort(late, rounds, sizeof(*late), by_value);
	printf("event after %d ms: median %.0f longest %.0f\n", delay_ms, late[rounds / 2],
	       late[rounds - 1]);
}

/* A channel and a queue, armed; the queue pair is connected to itself. */
static struct ibv_qp *armed(struct ibv_cq **cq)
{
	struct ibv_qp *qp;

	open_device();
	CHECK((channel = ibv_create_comp_channel(context)));
	CHECK((*cq = ibv_create_cq(context, 64, NULL, channel, 0)));
	qp = create_qp(*cq);
	connect_to_itself(qp, timers);
	post_recv(qp);
	CHECK(!ibv_req_notify_cq(*cq, 0));
	return qp;
}

static void blocked(void)
{
	struct ibv_cq *cq, *of;
	struct ibv_qp *qp;
	sigset_t all, now;
	void *unused;

	sigfillset(&all);
	CHECK(!sigprocmask(SIG_BLOCK, &all, NULL));
	CHECK(!pthread_sigmask(SIG_SETMASK, NULL, &now) && sigismember(&now, SIGUSR1) == 1);
	qp = armed(&cq);
	/* The device sleeps meanwhile. */
	usleep(100000);
	post_send(qp);
	CHECK(!ibv_get_cq_event(channel, &of, &unused) && of == cq);
}

static void *wait_for_ever(void *kind)
{
	struct pollfd one = { .fd = channel->fd, .events = POLLIN };
	struct epoll_event event;
	struct ibv_cq *of;
	void *unused;
	int epoll = epoll_create1(0);

	sem_post(&waits);
	if (!strcmp(kind, "read"))
		ibv_get_cq_event(channel, &of, &unused);
	else if (!strcmp(kind, "poll"))
		poll(&one, 1, -1);
	else
		epoll_wait(epoll, &event, 1, -1);
	return NULL;
}

static void cancel(void)
{
	static char *kinds[] = { "read", "poll", "epoll", "read" };
	struct ibv_cq *cq, *of;
	struct ibv_qp *qp = armed(&cq);
	pthread_t threads[4];
	void *result;

	sem_init(&waits, 0, 0);
	for (int n = 0; n < 4; n++) {
		CHECK(!pthread_create(&threads[n], NULL, wait_for_ever, kinds[n]));
		sem_wait(&waits);
	}
	usleep(50000);
	for (int n = 0; n < 4; n++) {
		CHECK(!pthread_cancel(threads[n]));
		CHECK(!pthread_join(threads[n], &result) && result == PTHREAD_CANCELED);
	}
	/* The device still has somebody who drives it. */
	post_send(qp);
	CHECK(!ibv_get_cq_event(channel, &of, &result) && of == cq);
}

static volatile int handled;
static pthread_t waiting_thread;

static void on_signal(int number)
{
	handled = number;
}

static void *interrupt(void *qp)
{
	usleep(50000);
	pthread_kill(waiting_thread, SIGUSR1);
	usleep(50000);
	CHECK(handled == SIGUSR1);
	if (qp)
		post_send(qp);
	return NULL;
}

static void signals(void)
{
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
	struct ibv_cq *cq, *of;
	struct ibv_qp *qp = armed(&cq);
	pthread_t thread;
	void *unused;

	waiting_thread = pthread_self();
	CHECK(!sigaction(SIGUSR1, &action, NULL));
	CHECK(!pthread_create(&thread, NULL, interrupt, qp));
	CHECK(!ibv_get_cq_event(channel, &of, &unused) && of == cq);
	CHECK(!pthread_join(thread, NULL));
	/* Without SA_RESTART the call ends. */
	action.sa_flags = 0;
	handled = 0;
	CHECK(!sigaction(SIGUSR1, &action, NULL));
	CHECK(!pthread_create(&thread, NULL, interrupt, NULL));
	CHECK(ibv_get_cq_event(channel, &of, &unused) == -1 && errno == EINTR);
	CHECK(!pthread_join(thread, NULL));
}

struct address {
	uint32_t number;
	uint16_t lid;
	union ibv_gid gid;
};

/* Connects to the queue pair of the other process. */
static void connect_pair(struct ibv_qp *qp, int fd)
{
	struct ibv_port_attr port;
	struct address own = { .number = qp->qp_num }, other;
	struct ibv_qp_attr attr = timers;

	CHECK(!ibv_query_port(context, 1, &port));
	CHECK(!ibv_query_gid(context, 1, 0, &own.gid));
	own.lid = port.lid;
	CHECK(write(fd, &own, sizeof(own)) == sizeof(own));
	CHECK(read(fd, &other, sizeof(other)) == sizeof(other));
	attr.qp_state = IBV_QPS_INIT;
	attr.port_num = 1;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					IBV_QP_ACCESS_FLAGS));
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = IBV_MTU_1024;
	attr.dest_qp_num = other.number;
	attr.max_dest_rd_atomic = 1;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.dlid = other.lid;
	attr.ah_attr.is_global = 1;
	attr.ah_attr.grh.dgid = other.gid;
	attr.ah_attr.grh.hop_limit = 1;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
					IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	attr.qp_state = IBV_QPS_RTS;
	attr.max_rd_atomic = 1;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
					IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					IBV_QP_MAX_QP_RD_ATOMIC));
}

static int poll_queue(struct ibv_cq *cq);
static sigjmp_buf left;

static void jump(int number)
{
	siglongjmp(left, number);
}

static void *wait_for_nothing(void *unused)
{
	poll(NULL, 0, -1);
	return unused;
}

static void *answer(void *qp)
{
	struct ibv_cq *cq = ((struct ibv_qp *)qp)->send_cq, *of;
	struct ibv_wc wc;
	void *unused;

	for (;;) {
		struct pollfd event = { .fd = cq->channel->fd, .events = POLLIN };

		CHECK(poll(&event, 1, -1) == 1);
		CHECK(!ibv_get_cq_event(cq->channel, &of, &unused));
		ibv_ack_cq_events(of, 1);
		CHECK(!ibv_req_notify_cq(cq, 0));
		while (ibv_poll_cq(cq, 1, &wc)) {
			CHECK(wc.status == IBV_WC_SUCCESS);
			if (wc.opcode == IBV_WC_RECV)
				post_send(qp);
		}
	}
}

/* Threads that have waited first leave their waits in one process; its answering threads still
 * get the messages of the other one. */
static void leave(const char *how, int fd, int answers)
{
	struct itimerval once = { .it_value = { 0, 100000 } };
	struct ibv_cq *cqs[4];
	struct ibv_qp *qps[4];
	pthread_t threads[6], answering;
	char byte = 0;

	open_device();
	for (int n = 0; n < 4; n++) {
		CHECK((channel = ibv_create_comp_channel(context)));
		CHECK((cqs[n] = ibv_create_cq(context, 64, NULL, channel, 0)));
		qps[n] = create_qp(cqs[n]);
		connect_pair(qps[n], fd);
		for (int m = 0; m < 16; m++)
			post_recv(qps[n]);
		CHECK(!ibv_req_notify_cq(cqs[n], 0));
	}
	if (answers && !strcmp(how, "cancel")) {
		for (int n = 0; n < 6; n++)
			CHECK(!pthread_create(&threads[n], NULL, wait_for_nothing, NULL));
		usleep(50000);
	} else if (answers) {
		signal(SIGALRM, jump);
		CHECK(!setitimer(ITIMER_REAL, &once, NULL));
		if (!sigsetjmp(left, 1))
			wait_for_nothing(NULL);
	}
	for (int n = 0; answers && n < 4; n++)
		CHECK(!pthread_create(&answering, NULL, answer, qps[n]));
	usleep(100000);
	for (int n = 0; answers && !strcmp(how, "cancel") && n < 6; n++) {
		CHECK(!pthread_cancel(threads[n]));
		CHECK(!pthread_join(threads[n], NULL));
	}
	usleep(300000);
	CHECK(write(fd, &byte, 1) == 1 && read(fd, &byte, 1) == 1);
	if (answers) {
		/* Not interposed: this thread does not drive the device. */
		_exit(recv(fd, &byte, 1, 0) != 1);
	}
	for (int n = 0; n < 40; n++) {
		double began = now(CLOCK_MONOTONIC);

		post_send(qps[n % 4]);
		while (!poll_queue(cqs[n % 4]))
			CHECK(now(CLOCK_MONOTONIC) - began < 5e6);
		usleep(n % 3 * 200);
	}
	CHECK(write(fd, &byte, 1) == 1);
}

static int poll_cursor(struct ibv_cq_ex *cq)
{
	struct ibv_poll_cq_attr attr = { 0 };
	int found = 0, rc = ibv_start_poll(cq, &attr);

	if (rc) {
		CHECK(rc == ENOENT);
		return 0;
	}
	do {
		CHECK(cq->status == IBV_WC_SUCCESS);
		found |= ibv_wc_read_opcode(cq) == IBV_WC_RECV;
	} while (!ibv_next_poll(cq));
	ibv_end_poll(cq);
	return found;
}

static int poll_queue(struct ibv_cq *cq)
{
	struct ibv_wc wc[4];
	int count = ibv_poll_cq(cq, 4, wc), found = 0;

	CHECK(count >= 0);
	for (int n = 0; n < count; n++) {
		CHECK(wc[n].status == IBV_WC_SUCCESS);
		found |= wc[n].opcode == IBV_WC_RECV;
	}
	return found;
}

/* Waits for a message; reads the completions of sends on the way. */
static void receive(const char *how, struct ibv_cq *cq, int epoll)
{
	if (!strcmp(how, "poll")) {
		while (!poll_queue(cq))
			;
		return;
	}
	if (!strcmp(how, "cursor")) {
		while (!poll_cursor((struct ibv_cq_ex *)cq))
			;
		return;
	}
	for (;;) {
		struct epoll_event event;
		struct ibv_cq *of;
		void *unused;

		if (poll_queue(cq))
			return;
		CHECK(!ibv_req_notify_cq(cq, 0));
		if (poll_queue(cq))
			return;
		if (epoll >= 0)
			CHECK(epoll_wait(epoll, &event, 1, -1) == 1);
		CHECK(!ibv_get_cq_event(channel, &of, &unused));
		ibv_ack_cq_events(of, 1);
	}
}

static double exchanges(const char *how, int fd, int first)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = 256, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct epoll_event event = { .events = EPOLLIN };
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	int epoll = -1;
	double began = 0;
	char byte = 0;

	open_device();
	CHECK((channel = ibv_create_comp_channel(context)));
	attr.channel = channel;
	cq = strcmp(how, "cursor") ? ibv_create_cq(context, 256, NULL, channel, 0)
				   : ibv_cq_ex_to_cq(ibv_create_cq_ex(context, &attr));
	CHECK(cq);
	if (!strcmp(how, "epoll")) {
		CHECK((epoll = epoll_create1(0)) >= 0);
		CHECK(!epoll_ctl(epoll, EPOLL_CTL_ADD, channel->fd, &event));
	}
	qp = create_qp(cq);
	connect_pair(qp, fd);
	for (int n = 0; n < 16; n++)
		post_recv(qp);
	CHECK(write(fd, &byte, 1) == 1 && read(fd, &byte, 1) == 1);
	/* The first tenth is not measured. */
	for (int n = -rounds / 10; n < rounds; n++) {
		if (n == 0)
			began = now(CLOCK_MONOTONIC);
		if (first)
			post_send(qp);
		receive(how, cq, epoll);
		post_recv(qp);
		if (!first)
			post_send(qp);
	}
	double took = (now(CLOCK_MONOTONIC) - began) / rounds / 2;

	CHECK(write(fd, &byte, 1) == 1);
	/* The last message leaves before the process ends. */
	CHECK(read(fd, &byte, 1) == 1);
	return took;
}

static double tcp(int fd, int first)
{
	char message[64] = { 0 };
	double began = 0;

	for (int n = -rounds / 10; n < rounds; n++) {
		if (n == 0)
			began = now(CLOCK_MONOTONIC);
		if (first)
			CHECK(write(fd, message, 64) == 64);
		CHECK(recv(fd, message, 64, MSG_WAITALL) == 64);
		if (!first)
			CHECK(write(fd, message, 64) == 64);
	}
	return (now(CLOCK_MONOTONIC) - began) / rounds / 2;
}

/* Connects two sockets over loopback. */
static void connected(int fds[2])
{
	struct sockaddr_in at = { .sin_family = AF_INET };
	socklen_t length = sizeof(at);
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);

	at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	CHECK(!bind(listener, (struct sockaddr *)&at, length) && !listen(listener, 1));
	CHECK(!getsockname(listener, (struct sockaddr *)&at, &length));
	CHECK((fds[0] = socket(AF_INET, SOCK_STREAM, 0)) >= 0);
	CHECK(!connect(fds[0], (struct sockaddr *)&at, length));
	CHECK((fds[1] = accept(listener, NULL, NULL)) >= 0);
	for (int n = 0; n < 2; n++)
		CHECK(!setsockopt(fds[n], IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)));
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";

	if (!strcmp(mode, "gaps")) {
		static char *all[] = { "0", "1", "5", "20", "100", "300" };

		if (argc > 2)
			gaps(argc - 2, argv + 2);
		else
			gaps(6, all);
	} else if (!strcmp(mode, "event") && argc == 4) {
		rounds = atoi(argv[3]);
		events(atoi(argv[2]));
	} else if (!strcmp(mode, "blocked")) {
		blocked();
	} else if (!strcmp(mode, "cancel")) {
		cancel();
	} else if (!strcmp(mode, "signals")) {
		signals();
	} else if (!strcmp(mode, "left") && argc == 3) {
		int fds[2], status, child;

		connected(fds);
		CHECK((child = fork()) >= 0);
		close(fds[!!child]);
		leave(argv[2], fds[!child], !child);
		CHECK(waitpid(child, &status, 0) == child && !status);
	} else if ((!strcmp(mode, "exchange") && argc == 4) ||
		   (!strcmp(mode, "tcp") && argc == 3)) {
		const char *how = argc == 4 ? argv[2] : "tcp";
		int fds[2], status, child;
		double took;

		rounds = atoi(argv[argc - 1]);
		struct rusage before, after;

		connected(fds);
		CHECK((child = fork()) >= 0);
		CHECK(!getrusage(RUSAGE_SELF, &before));
		took = argc == 4 ? exchanges(how, fds[!child], !!child)
				 : tcp(fds[!child], !!child);
		if (!child)
			_exit(0);
		CHECK(waitpid(child, &status, 0) == child && !status);
		CHECK(!getrusage(RUSAGE_SELF, &after));
		printf("%s one way %.1f sleeps %.2f\n", how, took,
		       (double)(after.ru_nvcsw - before.ru_nvcsw) / rounds / 1.1);
	} else {
		fprintf(stderr, "usage: waiting gaps|event|exchange|tcp ...\n");
		return 2;
	}
	return 0;
}

/*
 * Posts the same buffer several times, and changes it while it is in flight in the way that the
 * first argument names, or with a second argument afterwards.
 */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "loopback.h"

#define LENGTH 16384
#define ROUNDS 4

static char *memory, *target;
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr, *target_mr;
static struct ibv_qp *qp, *peer;
static int right;

static void post(int offset, int length, int operation)
{
	struct ibv_sge list = { (uintptr_t)memory + offset, length, mr->lkey };
	struct ibv_send_wr wr = { .wr_id = 0x5e, .sg_list = &list, .num_sge = 1,
				  .opcode = operation, .send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)target;
	wr.wr.rdma.rkey = target_mr->rkey;
	CHECK(!ibv_post_send(qp, &wr, &bad));
}

static void poll_one(void)
{
	struct ibv_wc wc;

	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS);
}

static __attribute__((noinline)) void write_to(volatile char *at)
{
	*at += 1;
	*at += 1;
	*at -= 1;
}

static void *writer(void *at)
{
	write_to(at);
	return NULL;
}

/* Writes to memory in a thread that has blocked all signals. */
static void write_in_thread(void *at)
{
	pthread_t thread;
	sigset_t all, before;

	sigfillset(&all);
	CHECK(!pthread_sigmask(SIG_SETMASK, &all, &before));
	CHECK(!pthread_create(&thread, NULL, writer, at));
	CHECK(!pthread_join(thread, NULL));
	CHECK(!pthread_sigmask(SIG_SETMASK, &before, NULL));
}

static volatile int faults;

static void on_fault(int number)
{
	(void)number;
	faults++;
	CHECK(!mprotect(target + LENGTH, 4096, PROT_READ | PROT_WRITE));
}

/* A handler on a stack of its own writes. */
static void on_user(int number)
{
	(void)number;
	write_to(memory + 8);
}

static void use_own_stack(void)
{
	stack_t stack = { .ss_size = 8192, .ss_sp = malloc(8192) };
	struct sigaction action = { .sa_handler = on_user, .sa_flags = SA_ONSTACK };

	CHECK(stack.ss_sp && !sigaltstack(&stack, NULL));
	CHECK(!sigaction(SIGUSR1, &action, NULL));
}

/* Lets a system call return a byte at an address. */
static __attribute__((noinline)) void receive_in(int call, char *at, int round)
{
	struct iovec part = { at, 1 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1 };
	char byte = 'A' + round;
	struct mmsghdr several = { .msg_hdr = message };
	int pair[2], file, count;
	FILE *stream;

	CHECK((file = memfd_create("bytes", 0)) >= 0 && write(file, &byte, 1) == 1);
	CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	CHECK(write(pair[0], &byte, 1) == 1);
	if (call == 'r')
		count = read(pair[1], at, 1);
	else if (call == 'v')
		count = recv(pair[1], at, 1, 0);
	else if (call == 'f')
		count = recvfrom(pair[1], at, 1, 0, NULL, NULL);
	else if (call == 'p')
		count = pread(file, at, 1, 0);
	else if (call == 'l')
		count = readv(pair[1], &part, 1);
	else if (call == 'o')
		count = preadv(file, &part, 1, 0);
	else if (call == 's') {
		CHECK((stream = fdopen(dup(pair[1]), "r")) && !setvbuf(stream, NULL, _IONBF, 0));
		count = fread(at, 1, 1, stream);
		CHECK(!fclose(stream));
	} else if (call == 'w')
		count = recvmmsg(pair[1], &several, 1, 0, NULL);
	else
		count = recvmsg(pair[1], &message, 0);
	CHECK(count == 1 && *at == byte);
	CHECK(!close(pair[0]) && !close(pair[1]) && !close(file));
}

static void change(const char *how, int round)
{
	int status;
	pid_t child;

	if (!strcmp(how, "write") || !strcmp(how, "long") || !strcmp(how, "one-page")) {
		write_to(memory + 8);
	} else if (!strcmp(how, "copy")) {
		char bytes[64];

		memset(bytes, round + 1, sizeof(bytes));
		memcpy(memory, bytes, *bytes ? 64 : 0);
	} else if (!strcmp(how, "thread")) {
		write_in_thread(memory + 8);
	} else if (!strcmp(how, "handler")) {
		CHECK(!raise(SIGUSR1));
	} else if (!strcmp(how, "beside")) {
		/* Beside the buffer, then in it. */
		write_to(memory + 200);
		post(128, 64, IBV_WR_RDMA_WRITE);
		write_to(memory + 8);
		poll_one();
	} else if (!strcmp(how, "fork")) {
		child = fork();
		CHECK(child >= 0);
		if (!child) {
			/* Of no function that is intercepted. */
			CHECK(syscall(SYS_getrandom, memory + 16, 8, 0) == 8);
			write_to(memory + 8);
			_exit(0);
		}
		CHECK(waitpid(child, &status, 0) == child && status == 0);
		write_to(memory + 8);
	} else if (!strncmp(how, "call-", 5)) {
		receive_in(how[5], memory, round);
	} else if (!strcmp(how, "own-fault")) {
		/* The program's own protection and handler. */
		write_to(memory + 8);
		CHECK(!mprotect(target + LENGTH, 4096, PROT_READ));
		write_to(target + LENGTH);
		CHECK(faults == round + 1);
	} else if (!strcmp(how, "registered")) {
		struct ibv_mr *other = ibv_reg_mr(pd, memory, LENGTH, IBV_ACCESS_LOCAL_WRITE);

		CHECK(other && !ibv_dereg_mr(other));
		write_to(memory + 8);
	} else if (!strcmp(how, "unmapped-beside")) {
		CHECK(!munmap(memory + LENGTH - 4096 * (1 + round % 3), 4096));
		write_to(memory + 8);
	} else if (!strcmp(how, "protected")) {
		CHECK(!mprotect(memory, LENGTH, PROT_READ));
		CHECK(!mprotect(memory, LENGTH, PROT_READ | PROT_WRITE));
		write_to(memory + 8);
	}
}

/* A read waits for a send, which waits for a receive. */
static void answer(void)
{
	struct ibv_recv_wr receive = { 0 }, *bad;

	post(4096, 0, IBV_WR_SEND);
	post(0, 64, IBV_WR_RDMA_READ);
	if (!right)
		write_to(memory + 8);
	CHECK(!ibv_post_recv(peer, &receive, &bad));
	for (int n = 0; n < 3; n++)
		poll_one();
}

int main(int count, char **arguments)
{
	const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	struct ibv_qp_init_attr ask = { .qp_type = IBV_QPT_RC, .cap = { 16, 16, 1, 1, 0 } };
	struct ibv_qp_attr rights = { .qp_access_flags = all, .timeout = 14, .retry_cnt = 7,
				      .rnr_retry = 7, .min_rnr_timer = 1 };
	struct ibv_device **devices = ibv_get_device_list(NULL);
	const char *how = arguments[1];
	int length = strcmp(how, "long") ? 64 : LENGTH;

	CHECK(count >= 2 && devices && devices[0]);
	right = count > 2;
	CHECK((context = ibv_open_device(devices[0])));
	CHECK((pd = ibv_alloc_pd(context)));
	memory = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	target = mmap(NULL, LENGTH + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
		      -1, 0);
	CHECK(memory != MAP_FAILED && target != MAP_FAILED);
	CHECK((mr = ibv_reg_mr(pd, memory, strcmp(how, "one-page") ? LENGTH : 256, all)));
	CHECK((target_mr = ibv_reg_mr(pd, target, LENGTH, all)));
	CHECK((cq = ibv_create_cq(context, 16, NULL, NULL, 0)));
	ask.send_cq = ask.recv_cq = cq;
	CHECK((qp = ibv_create_qp(pd, &ask)) && (peer = ibv_create_qp(pd, &ask)));
	connect_to(qp, peer->qp_num, rights);
	connect_to(peer, qp->qp_num, rights);
	if (!strcmp(how, "handler"))
		use_own_stack();
	if (!strcmp(how, "own-fault"))
		signal(SIGSEGV, on_fault);
	for (int round = 0; round < ROUNDS; round++) {
		if (!strcmp(how, "answer")) {
			answer();
			continue;
		}
		post(0, length, IBV_WR_RDMA_WRITE);
		if (right)
			poll_one();
		change(how, round);
		if (!right)
			poll_one();
	}
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_qp(peer) && !ibv_destroy_cq(cq));
	CHECK(!ibv_dereg_mr(mr));
	CHECK(!ibv_dereg_mr(target_mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
	return 0;
}

/*
 * What programs do with processes, threads and descriptors beside their devices.
 * Each mode uses a device before and after. Exit status 0 if all was as it should be.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define HALF 4096

/* The last write is to memory that is not mapped any more. */
static int unmaps;

static struct ibv_context *open_first(void)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	struct ibv_context *context;

	CHECK(list && count > 0);
	context = ibv_open_device(list[0]);
	CHECK(context);
	ibv_free_device_list(list);
	return context;
}

/* Writes to itself over a queue pair, and checks what arrives. */
static void use(struct ibv_context *context)
{
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	char *memory = mmap(NULL, 2 * HALF, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	struct ibv_port_attr port;
	union ibv_gid gid;
	int index = 1;
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { 8, 8, 1, 1 },
	};
	struct ibv_qp_attr at = {
		.qp_state = IBV_QPS_INIT, .port_num = 1,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	};

	CHECK(pd && cq && memory != MAP_FAILED);
	mr = ibv_reg_mr(pd, memory, 2 * HALF,
			IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	qp = ibv_create_qp(pd, &init);
	/* A device of an address may have a single GID. */
	CHECK(mr && qp && !ibv_query_gid(context, 1, index, &gid));
	CHECK(!ibv_query_port(context, 1, &port));
	if (!memcmp(&gid, &(union ibv_gid){ 0 }, sizeof gid))
		CHECK(!ibv_query_gid(context, 1, --index, &gid));
	CHECK(!ibv_modify_qp(qp, &at, IBV_QP_STATE | IBV_QP_PKEY_INDEX |
			     IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	at = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024,
		.dest_qp_num = qp->qp_num, .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .dlid = port.lid,
			     .grh = { .dgid = gid, .sgid_index = index, .hop_limit = 1 } },
	};
	CHECK(!ibv_modify_qp(qp, &at, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			     IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	at = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
		.max_rd_atomic = 1,
	};
	CHECK(!ibv_modify_qp(qp, &at, IBV_QP_STATE | IBV_QP_TIMEOUT |
			     IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
			     IBV_QP_MAX_QP_RD_ATOMIC));
	for (int n = 1; n <= 20; n++) {
		struct ibv_sge sge = { (uintptr_t)memory, HALF, mr->lkey };
		struct ibv_send_wr *bad, wr = {
			.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
			.send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { (uintptr_t)memory + HALF, mr->rkey },
		};
		struct ibv_wc wc = { 0 };
		int got;

		memset(memory, n, HALF);
		memset(memory + HALF, 0, HALF);
		if (unmaps && n == 20)
			CHECK(!munmap(memory + HALF, HALF));
		CHECK(!ibv_post_send(qp, &wr, &bad));
		while (!(got = ibv_poll_cq(cq, 1, &wc)))
			;
		CHECK(got == 1 && wc.status == IBV_WC_SUCCESS);
		CHECK((unmaps && n == 20) || !memcmp(memory, memory + HALF, HALF));
	}
	CHECK(!ibv_destroy_qp(qp) && !ibv_dereg_mr(mr));
	CHECK(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd));
	CHECK(!munmap(memory, 2 * HALF));
}

static sigjmp_buf fault_at;
static void *volatile fault_address;

static void on_fault(int number, siginfo_t *info, void *context)
{
	fault_address = info->si_addr;
	siglongjmp(fault_at, 1);
}

static void dies(struct ibv_context *ignored)
{
	signal(SIGSEGV, SIG_DFL);
	*(volatile int *)16 = 1;
}

/* Faults of the program are its own. */
static void handles_faults(void)
{
	struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
	struct sigaction before, now;
	pid_t pid;
	int status;

	CHECK(!sigaction(SIGSEGV, &action, &before) && (before.sa_handler == SIG_DFL ||
								 before.sa_sigaction == on_fault));
	for (int n = 0; n < 2; n++) {
		if (!sigsetjmp(fault_at, 1))
			*(volatile int *)(16L + n) = 1;
		CHECK(fault_address == (void *)(16L + n));
		CHECK(!sigaction(SIGSEGV, NULL, &now) && now.sa_sigaction == on_fault);
	}
	pid = fork();
	if (!pid) {
		dies(NULL);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
	CHECK(signal(SIGSEGV, SIG_IGN) == (void (*)(int))on_fault);
	CHECK(!raise(SIGSEGV));
	CHECK(!sigaction(SIGSEGV, &action, &before) && before.sa_handler == SIG_IGN);
}

static void own(struct ibv_context *ignored)
{
	struct ibv_context *context = open_first();

	use(context);
	CHECK(!ibv_close_device(context));
}

static void child(void (*run)(struct ibv_context *), struct ibv_context *context)
{
	pid_t pid = fork();
	int status;

	CHECK(pid >= 0);
	if (!pid) {
		run(context);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void grandchild(struct ibv_context *context)
{
	own(NULL);
	child(own, NULL);
}

static void parents(struct ibv_context *context)
{
	/* Depends on what the context has at the fork. */
	CHECK(ibv_alloc_pd(context) || errno == EIO);
}

static void execute(struct ibv_context *ignored)
{
	execl("/proc/self/exe", "processes", "use", NULL);
	_exit(9);
}

static void close_each(void)
{
	for (int fd = 3; fd < 4096; fd++)
		close(fd);
}

static void close_range_all(void)
{
	CHECK(!close_range(3, ~0U, 0));
}

static void close_from(void)
{
	closefrom(3);
}

static void close_range_by_number(void)
{
	CHECK(!syscall(SYS_close_range, 3, ~0U, 0));
	CHECK(syscall(SYS_close_range, 4, 3, 0) == -1 && errno == EINVAL);
}

static void close_each_by_number(void)
{
	for (int fd = 3; fd < 4096; fd++)
		syscall(SYS_close, fd);
}

/* A system call that no library sees. */
static void close_all_unseen(void)
{
#if defined(__x86_64__)
	long result = SYS_close_range;

	__asm__ volatile("syscall" : "+a"(result) : "D"(3L), "S"((long)~0U), "d"(0L)
			 : "rcx", "r11", "memory");
#elif defined(__aarch64__)
	register long result __asm__("x0") = 3, last __asm__("x1") = ~0U;
	register long flags __asm__("x2") = 0, number __asm__("x8") = SYS_close_range;

	__asm__ volatile("svc 0" : "+r"(result) : "r"(last), "r"(flags), "r"(number) : "memory");
#endif
	CHECK(!result);
}

static double processor_time(void)
{
	struct rusage used;

	CHECK(!getrusage(RUSAGE_SELF, &used));
	return used.ru_utime.tv_sec + used.ru_stime.tv_sec +
	       (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static void *opens(void *rounds)
{
	for (intptr_t n = 0; n < (intptr_t)rounds; n++)
		own(NULL);
	return NULL;
}

static void *uses(void *context)
{
	for (int n = 0; n < 100; n++)
		use(context);
	return NULL;
}

/* libibverbs' own lock may be held at a fork: children open nothing. */
static void *forks(void *context)
{
	for (int n = 0; n < 20; n++) {
		child(parents, context);
		child(execute, context);
	}
	return NULL;
}

static void threads(void *(*first)(void *), void *(*others)(void *), void *argument)
{
	pthread_t thread[6];

	for (int n = 0; n < 6; n++)
		CHECK(!pthread_create(&thread[n], NULL, n ? others : first, argument));
	for (int n = 0; n < 6; n++)
		pthread_join(thread[n], NULL);
}

/* What a server does that becomes a daemon: it says in a file that all is well. */
static void become_daemon(const char *path)
{
	int out;

	if (fork())
		return;
	setsid();
	if (fork())
		_exit(0);
	close_each();
	own(NULL);
	out = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
	CHECK(out >= 0 && write(out, "well", 4) == 4);
	_exit(0);
}

/* Devices take no numbers of descriptors but for what the program opens. */
static void takes_numbers(struct ibv_context *context, int first)
{
	int manager, next, channel;
	struct ibv_comp_channel *completions = ibv_create_comp_channel(context);

	CHECK(context->cmd_fd == first && context->async_fd == first + 1);
	CHECK(completions && completions->fd == first + 2);
	manager = open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC);
	next = dup(2);
	channel = open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC);
	CHECK(manager == first + 3 && next == first + 4 && channel == first + 5);
	for (int fd = next; fd < 512; fd++)
		CHECK(dup2(2, fd) == fd);
	use(context);
	for (int fd = next; fd < 512; fd++)
		CHECK(!close(fd));
	CHECK(!close(manager) && !ibv_destroy_comp_channel(completions));
}

/* A signal that the program blocks, once the devices have threads, waits for it. */
static void waits_for_signals(void)
{
	static const int others[] = { SIGKILL, SIGSTOP, SIGSEGV, SIGBUS, SIGFPE, SIGILL,
				      SIGTRAP, SIGSYS, 32, 33, 34 };
	struct timespec patience = { 60, 0 };
	/* Starts the thread of the connection manager. */
	int manager = open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC);
	sigset_t all, one;

	CHECK(manager >= 0);
	sigfillset(&all);
	CHECK(!pthread_sigmask(SIG_BLOCK, &all, NULL));
	for (int number = 1; number <= 64; number++) {
		int waits = 1;

		for (size_t n = 0; n < sizeof others / sizeof *others; n++)
			waits &= number != others[n];
		if (!waits)
			continue;
		sigemptyset(&one);
		sigaddset(&one, number);
		CHECK(!kill(getpid(), number));
		CHECK(sigtimedwait(&one, NULL, &patience) == number);
	}
	CHECK(!pthread_sigmask(SIG_UNBLOCK, &all, NULL) && !close(manager));
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "use";
	struct ibv_context *context;
	/* The lowest descriptor that is free. */
	int first = dup(2);
	pid_t pid;

	close(first);
#define IS(name) (!strcmp(mode, name))
	if (IS("fork-first")) {
		child(own, NULL);
		child(grandchild, NULL);
	}
	if (IS("fork-init"))
		CHECK(!ibv_fork_init());
	context = open_first();
	use(context);
	if (IS("forever")) {
		for (;;)
			own(NULL);
	} else if (IS("fork") || IS("fork-init")) {
		child(own, NULL);
		use(context);
		child(grandchild, NULL);
		child(parents, context);
		child(execute, NULL);
	} else if (IS("vfork")) {
		pid = vfork();
		if (!pid) {
			/* The shared memory stays as it is. */
			close_range(3, ~0U, 0);
			execl("/bin/true", "true", NULL);
			_exit(1);
		}
		CHECK(waitpid(pid, NULL, 0) == pid && !system("true"));
	} else if (IS("close-range") || IS("close-each") || IS("close-from")) {
		void (*close_all)(void) = IS("close-range") ? close_range_all :
			IS("close-each") ? close_each : close_from;

		close_all();
		CHECK(!ibv_alloc_pd(context) && errno == EBADF);
		context = open_first();
	} else if (IS("close-range-number") || IS("close-each-number")) {
		if (IS("close-range-number"))
			close_range_by_number();
		else
			close_each_by_number();
		CHECK(!ibv_alloc_pd(context) && errno == EBADF);
		context = open_first();
	} else if (IS("close-unseen")) {
		struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
		double before;

		CHECK(channel);
		close_all_unseen();
		/* The devices' thread does not spin, since nothing waits. */
		before = processor_time();
		sleep(1);
		CHECK(processor_time() - before < 0.25);
		own(NULL);
		CHECK(!ibv_destroy_comp_channel(channel));
		context = open_first();
	} else if (IS("close-standard")) {
		close(0);
		close(1);
		context = open_first();
	} else if (IS("no-descriptors")) {
		int last = 0;

		for (int fd; (fd = dup(2)) >= 0;)
			last = fd;
		CHECK(errno == EMFILE && !ibv_create_comp_channel(context));
		close(last);
		close(last - 1);
	} else if (IS("daemon")) {
		become_daemon(argv[2]);
	} else if (IS("unmap")) {
		unmaps = 1;
	} else if (IS("unmap-fault")) {
		handles_faults();
		unmaps = 1;
		use(context);
		handles_faults();
	} else if (IS("numbers")) {
		takes_numbers(context, first);
	} else if (IS("signals")) {
		waits_for_signals();
	} else if (IS("threads")) {
		threads(opens, opens, (void *)10);
	} else if (IS("threads-fork")) {
		threads(forks, uses, context);
	} else if (!IS("use") && !IS("fork-first")) {
		return 2;
	}
	use(context);
	CHECK(!ibv_close_device(context));
	return 0;
}

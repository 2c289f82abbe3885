/*
 * `hidden DELAY_MS ROUNDS`: opens a device again and again. One thread waits for an event,
 * and another one posts after the delay. From the second round on mmap and munmap are
 * rewritten to make the system calls themselves, as UCX does, so that pages of doorbells
 * come and go unseen, most at addresses of earlier ones. Prints how many events came late.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

#include "check.h"
#include "loopback.h"

enum { PAGE = 4096, LATE_MS = 5 };

static char buffer[PAGE] __attribute__((aligned(PAGE)));
static struct ibv_qp *qp;
static struct ibv_sge sge = { .addr = (uintptr_t)buffer, .length = 64 };
static int delay_ms;
static double posted;

static void *map(void *at, size_t length, int rights, int flags, int fd, off_t offset)
{
	return (void *)syscall(SYS_mmap, at, length, rights, flags, fd, offset);
}

static int unmap(void *at, size_t length)
{
	return syscall(SYS_munmap, at, length);
}

/* Makes a function of a library jump to another one. */
static void rewrite(const char *name, uintptr_t target)
{
	unsigned char *code = dlsym(RTLD_DEFAULT, name);
	uintptr_t first = (uintptr_t)code & -PAGE;

	CHECK(code);
	CHECK(!syscall(SYS_mprotect, first, 2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC));
#if defined(__x86_64__)
	/* movabs $target, %rax; jmp *%rax */
	memcpy(code, "\x48\xb8", 2);
	memcpy(code + 2, &target, sizeof(target));
	memcpy(code + 10, "\xff\xe0", 2);
#elif defined(__aarch64__)
	/* ldr x16, #8; br x16 */
	memcpy(code, "\x50\x00\x00\x58\x00\x02\x1f\xd6", 8);
	memcpy(code + 8, &target, sizeof(target));
	__builtin___clear_cache((char *)code, (char *)code + 16);
#endif
	CHECK(!syscall(SYS_mprotect, first, 2 * PAGE, PROT_READ | PROT_EXEC));
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static void *post(void *unused)
{
	struct ibv_send_wr send = {
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
	}, *bad;

	(void)unused;
	usleep(delay_ms * 1000);
	posted = now();
	CHECK(!ibv_post_send(qp, &send, &bad));
	return NULL;
}

/* Returns how long an event took, in milliseconds. */
static double measure(struct ibv_device *device)
{
	struct ibv_qp_attr attr = { .timeout = 18, .retry_cnt = 7, .rnr_retry = 7,
				    .min_rnr_timer = 1 };
	struct ibv_recv_wr receive = { .sg_list = &sge, .num_sge = 1 }, *bad;
	struct ibv_context *context;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq, *of;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_wc wc;
	pthread_t thread;
	void *unused;

	CHECK((context = ibv_open_device(device)) && (pd = ibv_alloc_pd(context)));
	CHECK((mr = ibv_reg_mr(pd, buffer, PAGE, IBV_ACCESS_LOCAL_WRITE)));
	CHECK((channel = ibv_create_comp_channel(context)));
	CHECK((cq = ibv_create_cq(context, 4, NULL, channel, 0)));
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.cap = { 2, 2, 1, 1 },
		.qp_type = IBV_QPT_RC,
	};
	CHECK((qp = ibv_create_qp(pd, &init)));
	connect_to_itself(qp, attr);
	sge.lkey = mr->lkey;
	CHECK(!ibv_post_recv(qp, &receive, &bad) && !ibv_req_notify_cq(cq, 0));
	CHECK(!pthread_create(&thread, NULL, post, NULL));
	CHECK(!ibv_get_cq_event(channel, &of, &unused));
	double took = now() - posted;
	ibv_ack_cq_events(cq, 1);
	CHECK(!pthread_join(thread, NULL));
	for (int found = 0; found < 2;) {
		int count = ibv_poll_cq(cq, 1, &wc);

		CHECK(count == 0 || (count == 1 && wc.status == IBV_WC_SUCCESS));
		found += count;
	}
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq));
	CHECK(!ibv_destroy_comp_channel(channel));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
	return took;
}

int main(int argc, char **argv)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	int late = 0;

	CHECK(argc == 3 && devices && *devices);
	delay_ms = atoi(argv[1]);
	int rounds = atoi(argv[2]);
	measure(*devices);
	rewrite("mmap", (uintptr_t)map);
	rewrite("mmap64", (uintptr_t)map);
	rewrite("munmap", (uintptr_t)unmap);
	for (int round = 0; round < rounds; round++)
		late += measure(*devices) > LATE_MS;
	printf("late %d rounds %d\n", late, rounds);
	return 0;
}

/*
 * Registered memory is pinned: whatever the program unmaps, maps, moves, protects or discards,
 * the device accesses the pages that were registered. Prints "well". The same program runs in
 * guests, on devices of the kernel.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "check.h"

#define PAGES 8
#define PAGE ((size_t)sysconf(_SC_PAGESIZE))
#define LENGTH (PAGES * PAGE)
#define ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | \
		IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)
#define QKEY 0x1234
#define GRH 40

enum { RC, UC, UD, KINDS };

/* A device: one accesses the memory of the other. */
static struct side {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qps[KINDS];
	struct ibv_port_attr port;
	union ibv_gid gid;
} peer, owner;

static struct ibv_ah *to_owner;
/* Memory of the peer, which stays. */
static char *local;
static struct ibv_mr *local_mr;
/* The memory whose mappings change, as it was registered. */
static char *memory;
static struct ibv_mr *mr;

static void open_side(struct side *side, struct ibv_device *device)
{
	static const enum ibv_qp_type types[KINDS] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};

	side->context = ibv_open_device(device);
	CHECK(side->context);
	side->pd = ibv_alloc_pd(side->context);
	side->cq = ibv_create_cq(side->context, 64, NULL, NULL, 0);
	CHECK(side->pd && side->cq);
	CHECK(!ibv_query_port(side->context, 1, &side->port));
	CHECK(!ibv_query_gid(side->context, 1, 0, &side->gid));
	for (int kind = 0; kind < KINDS; kind++) {
		struct ibv_qp_init_attr init = {
			.send_cq = side->cq, .recv_cq = side->cq, .qp_type = types[kind],
			.cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1,
				.max_recv_sge = 1},
			.sq_sig_all = 1,
		};

		side->qps[kind] = ibv_create_qp(side->pd, &init);
		CHECK(side->qps[kind]);
	}
}

static struct ibv_ah_attr route(struct side *to)
{
	return (struct ibv_ah_attr){.port_num = 1, .dlid = to->port.lid, .is_global = 1,
				    .grh = {.dgid = to->gid, .hop_limit = 1}};
}

static void connect_side(struct side *from, struct side *to)
{
	for (int kind = 0; kind < KINDS; kind++) {
		int reliable = kind == RC, datagrams = kind == UD;
		struct ibv_qp_attr attr = {
			.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY,
			.qp_access_flags = ACCESS,
		};

		if (kind == UC)
			attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
		CHECK(!ibv_modify_qp(from->qps[kind], &attr,
			IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			(datagrams ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
		attr.qp_state = IBV_QPS_RTR;
		attr.path_mtu = IBV_MTU_1024;
		attr.dest_qp_num = to->qps[kind]->qp_num;
		attr.max_dest_rd_atomic = 1;
		attr.min_rnr_timer = 1;
		attr.ah_attr = route(to);
		CHECK(!ibv_modify_qp(from->qps[kind], &attr,
			IBV_QP_STATE | (datagrams ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU |
							 IBV_QP_DEST_QPN | IBV_QP_RQ_PSN) |
			(reliable ? IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER : 0)));
		attr.qp_state = IBV_QPS_RTS;
		attr.max_rd_atomic = 1;
		attr.timeout = 14;
		attr.retry_cnt = 7;
		attr.rnr_retry = 7;
		CHECK(!ibv_modify_qp(from->qps[kind], &attr, IBV_QP_STATE | IBV_QP_SQ_PSN |
			(reliable ? IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				    IBV_QP_MAX_QP_RD_ATOMIC : 0)));
	}
}

static void completes(struct side *side)
{
	struct ibv_wc wc;
	int count;

	do
		CHECK((count = ibv_poll_cq(side->cq, 1, &wc)) >= 0);
	while (!count);
	if (wc.status != IBV_WC_SUCCESS)
		fprintf(stderr, "%s\n", ibv_wc_status_str(wc.status));
	CHECK(wc.status == IBV_WC_SUCCESS);
}

static struct ibv_sge local_sge(size_t length)
{
	return (struct ibv_sge){(uintptr_t)local, length, local_mr->lkey};
}

static struct ibv_sge sge(size_t offset, size_t length)
{
	return (struct ibv_sge){(uintptr_t)memory + offset, length, mr->lkey};
}

static void post(struct side *side, int kind, enum ibv_wr_opcode opcode, struct ibv_sge sge,
		 size_t offset)
{
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode}, *bad;

	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = (uintptr_t)memory + offset;
		wr.wr.atomic.rkey = mr->rkey;
		wr.wr.atomic.compare_add = 1;
	} else if (kind == UD) {
		wr.wr.ud.ah = to_owner;
		wr.wr.ud.remote_qpn = owner.qps[UD]->qp_num;
		wr.wr.ud.remote_qkey = QKEY;
	} else {
		wr.wr.rdma.remote_addr = (uintptr_t)memory + offset;
		wr.wr.rdma.rkey = mr->rkey;
	}
	CHECK(!ibv_post_send(side->qps[kind], &wr, &bad));
	completes(side);
}

static void post_receive(struct side *side, int kind, struct ibv_sge sge)
{
	struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;

	CHECK(!ibv_post_recv(side->qps[kind], &wr, &bad));
}

static bool all(const char *bytes, int value, size_t length)
{
	for (size_t i = 0; i < length; i++)
		if (bytes[i] != (char)value) {
			fprintf(stderr, "byte %zu is 0x%x, not 0x%x\n", i,
				(unsigned char)bytes[i], (unsigned char)value);
			return false;
		}
	return true;
}

/* The peer reads. */
static bool holds(int value, size_t offset, size_t length)
{
	memset(local, '-', length);
	post(&peer, RC, IBV_WR_RDMA_READ, local_sge(length), offset);
	return all(local, value, length);
}

/* A write arrives later on an unreliable queue pair. */
static bool will_hold(int value, size_t offset, size_t length)
{
	for (int tries = 0; tries < 1000; tries++) {
		post(&peer, RC, IBV_WR_RDMA_READ, local_sge(length), offset);
		if (local[length - 1] == (char)value)
			break;
		usleep(1000);
	}
	return all(local, value, length);
}

/* Each kind of access. Afterwards bytes from `at` on are 'w' but for 8. */
#define AT (2 * PAGE - 200)
#define BYTES 400
static void access_all(int value)
{
	uint64_t before, *number = (uint64_t *)local;

	if (value >= 0)
		CHECK(holds(value, AT, BYTES));
	memset(local, 'w', BYTES);
	post(&peer, RC, IBV_WR_RDMA_WRITE, local_sge(BYTES), AT);
	CHECK(holds('w', AT, BYTES));
	/* An atomic operation in the changed page. */
	memset(&before, 'w', 8);
	post(&peer, RC, IBV_WR_ATOMIC_FETCH_AND_ADD, local_sge(8), 2 * PAGE + 8);
	CHECK(*number == before);
	post(&peer, RC, IBV_WR_RDMA_READ, local_sge(8), 2 * PAGE + 8);
	CHECK(*number == before + 1);
	/* Receives. */
	post_receive(&owner, RC, sge(AT, BYTES));
	memset(local, 'r', BYTES);
	post(&peer, RC, IBV_WR_SEND, local_sge(BYTES), 0);
	completes(&owner);
	CHECK(holds('r', AT, BYTES));
	post_receive(&owner, UC, sge(AT, BYTES));
	memset(local, 'u', BYTES);
	post(&peer, UC, IBV_WR_SEND, local_sge(BYTES), 0);
	completes(&owner);
	CHECK(holds('u', AT, BYTES));
	post_receive(&owner, UD, sge(AT - GRH, GRH + BYTES));
	memset(local, 'd', BYTES);
	post(&peer, UD, IBV_WR_SEND, local_sge(BYTES), 0);
	completes(&owner);
	CHECK(holds('d', AT, BYTES));
	/* Sends. */
	post_receive(&peer, RC, local_sge(BYTES));
	post(&owner, RC, IBV_WR_SEND, sge(AT, BYTES), 0);
	completes(&peer);
	CHECK(all(local, 'd', BYTES));
	memset(local, 'w', BYTES);
	post(&peer, UC, IBV_WR_RDMA_WRITE, local_sge(BYTES), AT);
	CHECK(will_hold('w', AT, BYTES));
	/* Long messages. */
	memset(local, 'w', 4 * PAGE);
	post(&peer, RC, IBV_WR_RDMA_WRITE, local_sge(4 * PAGE), AT);
	CHECK(holds('w', AT, 4 * PAGE));
}

static void map(int flags, int fd)
{
	memory = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, flags, fd, 0);
	CHECK(memory != MAP_FAILED);
	memset(memory, 'o', LENGTH);
	mr = ibv_reg_mr(owner.pd, memory, LENGTH, ACCESS);
	CHECK(mr);
}

static void map_private(void)
{
	map(MAP_PRIVATE | MAP_ANONYMOUS, -1);
}

/* Maps new memory with data of the program. */
static char *map_anew(char *at, size_t length, int flags)
{
	char *new = mmap(at, length, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);

	CHECK(new == at);
	memset(new, 'n', length);
	return new;
}

static void end(void)
{
	CHECK(!ibv_dereg_mr(mr));
	munmap(memory, LENGTH);
}

/* Whole and in part, by unmapping and by mapping over it. */
static void replaced(size_t first, size_t count, bool over, int flags)
{
	char *start;

	map(flags | MAP_ANONYMOUS, -1);
	start = memory + first * PAGE;
	if (!over)
		CHECK(!munmap(start, count * PAGE));
	map_anew(start, count * PAGE, over ? MAP_FIXED : 0);
	access_all('o');
	CHECK(all(start, 'n', count * PAGE));
	/* The new pages are registered beside the old ones. */
	struct ibv_mr *old = mr;
	mr = ibv_reg_mr(owner.pd, memory, LENGTH, ACCESS);
	CHECK(mr);
	CHECK(holds('n', start - memory, count * PAGE));
	CHECK(!ibv_dereg_mr(old));
	CHECK(holds('n', start - memory, count * PAGE));
	CHECK(all(start, 'n', count * PAGE));
	end();
}

static void unmapped(void)
{
	map_private();
	CHECK(!munmap(memory, LENGTH));
	access_all('o');
	end();
}

/* Two regions have the same pages, and one ends. */
static void shared_by_regions(void)
{
	struct ibv_mr *other;

	map_private();
	other = ibv_reg_mr(owner.pd, memory + PAGE, 2 * PAGE, ACCESS);
	CHECK(other);
	CHECK(!munmap(memory, LENGTH));
	map_anew(memory, LENGTH, 0);
	access_all('o');
	CHECK(!ibv_dereg_mr(mr));
	mr = other;
	CHECK(holds('w', AT, BYTES));
	CHECK(all(memory, 'n', LENGTH));
	end();
}

static void moved(bool unmap)
{
	char *old, *new, *target;

	map_private();
	old = memory;
	target = mmap(NULL, LENGTH, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(target != MAP_FAILED);
	new = mremap(memory, LENGTH, LENGTH, MREMAP_MAYMOVE | MREMAP_FIXED, target);
	CHECK(new == target);
	map_anew(old, LENGTH, 0);
	if (unmap) {
		CHECK(!munmap(new, LENGTH));
		map_anew(new, LENGTH, 0);
	}
	access_all('o');
	CHECK(all(old, 'n', LENGTH));
	/* The program finds its memory where it has moved it. */
	if (unmap) {
		CHECK(all(new, 'n', LENGTH));
	} else {
		CHECK(all(new + AT, 'w', BYTES));
		memset(new + AT, 'p', BYTES);
		CHECK(holds('p', AT, BYTES));
	}
	munmap(new, LENGTH);
	CHECK(holds(unmap ? 'w' : 'p', AT, BYTES));
	end();
}

static void shrunk(void)
{
	map_private();
	CHECK(mremap(memory, LENGTH, PAGE, 0) == memory);
	map_anew(memory + PAGE, LENGTH - PAGE, 0);
	access_all('o');
	CHECK(all(memory + PAGE, 'n', LENGTH - PAGE));
	end();
}

/* Calls that fail change nothing. */
static void refused(void)
{
	char *target;

	map_private();
	target = mmap(NULL, LENGTH, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(target != MAP_FAILED);
	CHECK(mremap(target, LENGTH, LENGTH, MREMAP_FIXED, memory) == MAP_FAILED);
	CHECK(mremap(memory, LENGTH, LENGTH, MREMAP_MAYMOVE | MREMAP_FIXED, memory + PAGE) ==
	      MAP_FAILED);
	CHECK(all(memory, 'o', LENGTH));
	access_all('o');
	CHECK(all(memory + AT, 'w', BYTES));
	munmap(target, LENGTH);
	end();
}

/* In the data segment. */
static void at_the_break(void)
{
	size_t rest = (uintptr_t)sbrk(0) % PAGE;

	CHECK(sbrk(rest ? PAGE - rest : 0) != (void *)-1);
	memory = sbrk(LENGTH);
	CHECK(memory != (void *)-1);
	memset(memory, 'o', LENGTH);
	mr = ibv_reg_mr(owner.pd, memory, LENGTH, ACCESS);
	CHECK(mr);
	/* Queries by an end that the system refuses, as UCX makes them. */
	brk(NULL);
	brk((void *)(uintptr_t)PAGE);
	CHECK(all(memory, 'o', LENGTH));
	access_all('o');
	CHECK(all(memory + AT, 'w', BYTES));
	memset(memory, 'o', LENGTH);
	if (sbrk(0) == memory + LENGTH) {
		CHECK(!brk(memory));
		CHECK(sbrk(LENGTH) == memory);
		CHECK(all(memory, 0, LENGTH));
		memset(memory, 'n', LENGTH);
		access_all('o');
		CHECK(all(memory, 'n', LENGTH));
	}
	CHECK(!ibv_dereg_mr(mr));
}

static void protected(int protection, int flags)
{
	map(flags | MAP_ANONYMOUS, -1);
	CHECK(!mprotect(memory + 2 * PAGE, 4 * PAGE, protection));
	access_all('o');
	if (protection & PROT_READ)
		CHECK(all(memory + 2 * PAGE, 'w', PAGE));
	CHECK(!mprotect(memory, LENGTH, PROT_READ | PROT_WRITE));
	CHECK(all(memory + 2 * PAGE, 'w', PAGE));
	memset(memory, 'o', LENGTH);
	access_all('o');
	CHECK(all(memory + 2 * PAGE, 'w', PAGE));
	end();
}

static void discarded(void)
{
	map_private();
	CHECK(!madvise(memory, LENGTH, MADV_DONTNEED));
	CHECK(all(memory, 0, LENGTH));
	memset(memory, 'n', LENGTH);
	access_all('o');
	CHECK(all(memory, 'n', LENGTH));
	end();
	/* The pages of a shared mapping stay, for the program as well. */
	map(MAP_SHARED | MAP_ANONYMOUS, -1);
	CHECK(!madvise(memory, LENGTH, MADV_DONTNEED));
	CHECK(all(memory, 'o', LENGTH));
	access_all('o');
	CHECK(all(memory + AT, 'w', BYTES));
	end();
	map(MAP_SHARED | MAP_ANONYMOUS, -1);
	CHECK(!madvise(memory, LENGTH, MADV_REMOVE));
	CHECK(all(memory, 0, LENGTH));
	access_all('o');
	CHECK(all(memory, 0, LENGTH));
	end();
	map_private();
	CHECK(!madvise(memory, LENGTH, MADV_FREE));
	access_all('o');
	CHECK(all(memory + AT, 'w', BYTES));
	end();
}

static void truncated(void)
{
	int fd = memfd_create("memory", 0);

	CHECK(fd >= 0 && !ftruncate(fd, LENGTH));
	map(MAP_SHARED, fd);
	CHECK(!ftruncate(fd, PAGE));
	access_all(-1);
	end();
	close(fd);
}

static void forked(void)
{
	char *mapped;
	int status;
	pid_t child;

	map_private();
	mapped = memory;
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		memset(mapped, 'c', LENGTH);
		_exit(munmap(mapped, LENGTH) || !all(map_anew(mapped, PAGE, 0), 'n', PAGE));
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	access_all('o');
	CHECK(all(memory + AT, 'w', BYTES));
	/* A child that still has the pages while the parent gives them up. */
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		pause();
		_exit(0);
	}
	memset(memory, 'o', LENGTH);
	CHECK(!munmap(memory, LENGTH));
	map_anew(memory, LENGTH, 0);
	access_all('o');
	CHECK(all(memory, 'n', LENGTH));
	kill(child, SIGKILL);
	CHECK(waitpid(child, &status, 0) == child);
	end();
}

int main(void)
{
	struct ibv_device **devices;
	int count;

	alarm(120);
	devices = ibv_get_device_list(&count);
	CHECK(devices && count > 0);
	open_side(&peer, devices[0]);
	open_side(&owner, devices[count - 1]);
	connect_side(&peer, &owner);
	connect_side(&owner, &peer);
	struct ibv_ah_attr attr = route(&owner);
	to_owner = ibv_create_ah(peer.pd, &attr);
	CHECK(to_owner);
	local = aligned_alloc(PAGE, LENGTH);
	local_mr = ibv_reg_mr(peer.pd, local, LENGTH, ACCESS);
	CHECK(local_mr);

	map_private();
	access_all('o');
	end();
	unmapped();
	for (int over = 0; over < 2; over++)
		for (int shared = 0; shared < 2; shared++) {
			int flags = shared ? MAP_SHARED : MAP_PRIVATE;

			replaced(0, PAGES, over, flags);
			replaced(2, 3, over, flags);
		}
	shared_by_regions();
	moved(false);
	moved(true);
	shrunk();
	refused();
	at_the_break();
	for (int shared = 0; shared < 2; shared++) {
		protected(PROT_NONE, shared ? MAP_SHARED : MAP_PRIVATE);
		protected(PROT_READ, shared ? MAP_SHARED : MAP_PRIVATE);
	}
	discarded();
	truncated();
	forked();
	printf("well\n");
	return 0;
}

/* SPDX-License-Identifier: MIT */
/*
 * Common code of the test programs: checks that print their place and values, a
 * pair of queue pairs connected through the device's loopback, and a description
 * of send operations for both post interfaces.
 *
 * Environment: RXE_DEV    device name (default: the first device)
 *              RXE_GID    GID index of a RoCE v2 address (default: searched)
 *              RXE_EXPECT part of the file name of the provider that must serve
 *                         the device; the program fails with another one
 * Exit status: 0 passed, 77 skipped (prints the reason), other values failed.
 */
#ifndef RXE_TESTS_COMMON_H
#define RXE_TESTS_COMMON_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* Prints file:line and the message, then exits with status 1. */
#define FAIL(...) test_fail(__FILE__, __LINE__, __VA_ARGS__)
#define SKIP(...) test_skip(__VA_ARGS__)
#define CHECK(cond)                                                            \
	do {                                                                   \
		if (!(cond))                                                   \
			FAIL("not true: %s (errno %d)", #cond, errno);         \
	} while (0)
#define EQ(got, want)                                                          \
	do {                                                                   \
		long long got_ = (long long)(got), want_ = (long long)(want);  \
		if (got_ != want_)                                             \
			FAIL("%s is %lld (%#llx), not %s = %lld (%#llx)",      \
			     #got, got_, got_, #want, want_, want_);           \
	} while (0)
/* For verbs that return 0 or an errno value. */
#define OK(call)                                                               \
	do {                                                                   \
		int rc_ = (call);                                              \
		if (rc_)                                                       \
			FAIL("%s returned %d (%s), errno %d", #call, rc_,      \
			     strerror(rc_ < 0 ? errno : rc_), errno);          \
	} while (0)
/* For verbs that return an object or NULL with errno. */
#define MUST(ptr)                                                              \
	({                                                                     \
		__auto_type p_ = (ptr);                                        \
		if (!p_)                                                       \
			FAIL("%s returned NULL, errno %d (%s)", #ptr, errno,   \
			     strerror(errno));                                 \
		p_;                                                            \
	})
/* The call must return NULL and set this errno. */
#define NULL_WITH(ptr, err)                                                    \
	do {                                                                   \
		errno = 0;                                                     \
		const void *p_ = (ptr);                                        \
		int e_ = errno;                                                \
		if (p_)                                                        \
			FAIL("%s succeeded, want NULL with errno %d", #ptr,    \
			     (int)(err));                                      \
		if (e_ != (err))                                               \
			FAIL("%s: errno is %d (%s), not %s", #ptr, e_,         \
			     strerror(e_), #err);                              \
	} while (0)

void test_fail(const char *file, int line, const char *fmt, ...)
	__attribute__((noreturn, format(printf, 3, 4)));
void test_skip(const char *fmt, ...)
	__attribute__((noreturn, format(printf, 1, 2)));

struct test_case {
	const char *name;
	void (*run)(void);
};
/*
 * Runs the case named by argv[1] with a time limit in seconds. Several cases, or
 * "all", run in one process each. Without a case the names are printed and 2 is
 * returned.
 */
int test_main(int argc, char **argv, const struct test_case *cases, size_t n,
	      unsigned seconds);
/* Starts the time limit again; after it the process prints a message and exits. */
void test_limit(unsigned seconds);

/* Runs the function in a child process; a signal there fails the test. */
void in_child(void (*run)(void), const char *what);

double now_ms(void);
void sleep_ms(unsigned ms);

/* Fills in and checks data that depends on the seed only. */
void pattern(void *p, size_t n, unsigned seed);
void check_pattern(const char *file, int line, const void *p, size_t n,
		   unsigned seed);
void check_byte(const char *file, int line, const void *p, size_t n,
		unsigned value);
#define CHECK_PATTERN(p, n, seed) check_pattern(__FILE__, __LINE__, p, n, seed)
#define CHECK_BYTE(p, n, value) check_byte(__FILE__, __LINE__, p, n, value)

/* Whether the kernel has this release or a later one. */
bool kernel_at_least(int major, int minor);

/* Resources of this process. */
unsigned count_maps(const char *name_part); /* "" counts all mappings */
unsigned count_fds(void);
unsigned long rss_kb(void);
/* The kernel's number of "qp", "cq", "mr", "pd", "srq" objects of a device, from
 * rdma(8); -1 if that fails. */
int kernel_objects(const char *dev, const char *what);

struct ibv_context *open_device(void); /* RXE_DEV; checks the provider */
struct ibv_context *open_device_named(const char *name);
int gid_index(struct ibv_context *ctx);
uint64_t device_caps_ex(struct ibv_context *ctx);
/* Bits of device_cap_flags_ex that older headers do not define. */
#define CAP_FLUSH_GLOBAL (1ULL << 38)
#define CAP_FLUSH_PERSISTENT (1ULL << 39)
#define CAP_ATOMIC_WRITE (1ULL << 40)
/* Access flags of FLUSH that older headers do not define. */
#define ACCESS_FLUSH_GLOBAL (1 << 8)
#define ACCESS_FLUSH_PERSISTENT (1 << 9)

enum api { POST, WR }; /* ibv_post_send, or ibv_wr_* */

struct pair_opts {
	enum ibv_qp_type type;
	enum api api;	/* POST: ibv_create_qp; WR: ibv_create_qp_ex */
	unsigned wr;	/* queue depth, default 64 */
	unsigned sge;	/* default 4 */
	unsigned inl;	/* max_inline_data, default 0 */
	unsigned cqe;	/* default 256 */
	size_t size;	/* bytes of each side's region, default 1 MiB */
	bool sig_all;
	bool srq;	/* the receiver uses an SRQ */
	bool events;	/* each completion queue has a channel */
	bool cq_ex;	/* ibv_create_cq_ex with byte_len, imm, qp_num, src_qp */
	bool unconnected; /* leave the queue pairs in RESET */
	int mr_access;	/* additional access flags of regions and QPs */
	int timeout, retry, rnr_retry, min_rnr; /* 0: 14, 7, 7, 12 */
	bool no_retry, no_rnr_retry; /* retry counts of 0 */
};

struct end {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_comp_channel *ch;
	struct ibv_cq *cq;
	struct ibv_cq_ex *cqx;
	struct ibv_srq *srq;
	struct ibv_qp *qp;
	struct ibv_qp_ex *qpx;
	struct ibv_mr *mr;
	uint8_t *buf;
	size_t size;
	struct ibv_ah *ah; /* UD: to the other end */
	uint32_t peer_qpn;
	enum ibv_qp_type type;
};

#define QKEY 0x11223344

struct pair {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct pair_opts o;
	unsigned mtu; /* path MTU in bytes */
	struct end a, b;
};

/* Opens the device, creates both ends and connects them, or fails the test. */
void pair_open(struct pair *p, struct pair_opts o);
/* As pair_open, on an open context. */
void pair_open_on(struct pair *p, struct ibv_context *ctx, struct pair_opts o);
/* Destroys all objects, which must succeed. */
void pair_close(struct pair *p);
/* The objects of one end, for tests without a pair. */
void end_open(struct end *e, struct ibv_context *ctx, struct ibv_pd *pd,
	      const struct pair_opts *o, bool srq);
void end_close(struct end *e);
void end_connect(struct end *e, const struct pair_opts *o, uint32_t peer_qpn,
		 const union ibv_gid *peer_gid);
void qp_to(struct ibv_qp *qp, enum ibv_qp_state state); /* RESET, ERR */
enum ibv_qp_state qp_state(struct ibv_qp *qp);
uint64_t all_send_ops(enum ibv_qp_type type, uint64_t caps_ex);

/* A send operation, for both post interfaces. */
struct op {
	enum ibv_wr_opcode opcode;
	unsigned flags; /* ibv_send_flags; INLINE selects the inline setters */
	bool list;	/* WR: list setters also for one element */
	bool no_inline_flag; /* WR: inline setters without INLINE in wr_flags */
	uint64_t wr_id;
	int nsge;
	struct ibv_sge sge[32];
	uint64_t remote;
	uint32_t rkey;
	__be32 imm;
	uint32_t inv_rkey;
	uint64_t compare_add, swap;
	uint8_t value[8]; /* atomic write */
	struct ibv_mw *mw;
	uint32_t mw_rkey;
	struct ibv_mw_bind_info bind;
	uint8_t flush_type, flush_level;
	uint32_t flush_len;
};
/*
 * Posts `n` operations as one list (POST) or between one start and complete (WR).
 * Returns the result of the interface, and in *posted the number of accepted ones.
 */
int post_ops(struct end *e, const struct op *ops, int n, enum api api,
	     int *posted);
/* Posts operations, which must succeed. */
#define POST_OK(e, ops, n, api) OK(post_ops(e, ops, n, api, NULL))
/* An operation with one SGE at `off` of the end's region. */
struct op op_on(struct end *e, enum ibv_wr_opcode opcode, uint64_t wr_id,
		size_t off, uint32_t len);
struct ibv_sge sge_on(struct end *e, size_t off, uint32_t len);
/* Posts one receive and returns the result. */
int try_recv(struct end *e, uint64_t wr_id, const struct ibv_sge *sge, int n);
void post_recv(struct end *e, uint64_t wr_id, size_t off, uint32_t len);

/* Waits up to `ms` for one completion; returns false after that time. */
bool poll_wait(struct ibv_cq *cq, struct ibv_wc *wc, unsigned ms);
/* There must be a completion within 10 s. */
struct ibv_wc poll_one(const char *file, int line, struct ibv_cq *cq);
#define POLL(cq) poll_one(__FILE__, __LINE__, cq)
/* There must be no completion for `ms`. */
void poll_none(const char *file, int line, struct ibv_cq *cq, unsigned ms);
#define EXPECT_NO_WC(cq) poll_none(__FILE__, __LINE__, cq, 30)

/* Checks for success and these fields; flags are compared without GRH. */
void check_wc(const char *file, int line, const struct ibv_wc *wc,
	      uint64_t wr_id, enum ibv_wc_opcode opcode, uint32_t byte_len,
	      uint32_t qp_num, uint32_t src_qp, unsigned flags, uint32_t imm);
/* The next completion must be a success with these fields. */
#define EXPECT_WC(e, wr_id, opcode, len)                                       \
	do {                                                                   \
		struct ibv_wc wc_ = POLL((e)->cq);                             \
		check_wc(__FILE__, __LINE__, &wc_, wr_id, opcode, len,         \
			 (e)->qp->qp_num, 0, 0, 0);                            \
	} while (0)
/* `allowed` is a set of statuses: bits numbered by enum ibv_wc_status. */
void check_status(const char *file, int line, const struct ibv_wc *wc,
		  uint64_t wr_id, unsigned allowed, uint32_t qp_num);
#define ONLY(status) (1u << (status))
/* The next completion must have one of these statuses; checks wr_id and qp_num. */
#define EXPECT_STATUS_IN(e, wr_id_, allowed)                                   \
	do {                                                                   \
		struct ibv_wc wc_ = POLL((e)->cq);                             \
		check_status(__FILE__, __LINE__, &wc_, wr_id_, allowed,        \
			     (e)->qp->qp_num);                                 \
	} while (0)
#define EXPECT_STATUS(e, wr_id, status) EXPECT_STATUS_IN(e, wr_id, ONLY(status))
enum ibv_wc_opcode wc_opcode_of(enum ibv_wr_opcode op);

/* Waits for a completion event, checks its queue, acknowledges it. */
bool wait_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **context,
		unsigned ms);
bool fd_readable(int fd, unsigned ms);
/* Waits for an asynchronous event; the caller acknowledges it. */
bool wait_async(struct ibv_context *ctx, struct ibv_async_event *ev,
		unsigned ms);

#endif

/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE
#include "mlx5_own.h"

#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <stdio.h>
#include <string.h>

#include "mlx5_device.h"

static struct ibv_qp *(*create_qp)(struct ibv_context *, struct ibv_qp_init_attr_ex *,
				   struct mlx5dv_qp_init_attr *);
static struct mlx5dv_qp_ex *(*extended_part)(struct ibv_qp_ex *);
static struct mlx5dv_mkey *key;
static int (*check)(struct mlx5dv_mkey *, struct mlx5dv_mkey_err *, size_t);
static struct mlx5dv_dek *dek;
/* With signatures, with encryption, with both. */
static struct mlx5dv_mkey *protected_keys[3];

/* With a credential that is shorter than the longest, and one that is not. */
static void log_in(struct ibv_context *context)
{
	struct mlx5dv_crypto_login_attr longest = { .credential_id = 5,
						    .import_kek_id = 0xabcdef };
	struct mlx5dv_crypto_login_attr_ex attr = { .credential_id = 0xffffff,
						    .import_kek_id = 7,
						    .credential = "credential",
						    .credential_len = 10 };
	int (*login)(struct ibv_context *, struct mlx5dv_crypto_login_attr *) =
		(__typeof__(login))(uintptr_t)device_function(context,
							      "mlx5dv_crypto_login");
	struct mlx5dv_crypto_login_obj *(*create)(
		struct ibv_context *, struct mlx5dv_crypto_login_attr_ex *) =
		(__typeof__(create))(uintptr_t)device_function(
			context, "mlx5dv_crypto_login_create");

	memset(longest.credential, 0x5a, sizeof(longest.credential));
	if (login(context, &longest) || login(context, &longest) != EEXIST)
		die("mlx5dv_crypto_login");
	if (!create(context, &attr))
		die("mlx5dv_crypto_login_create: %s", strerror(errno));
}

/* Those that made the keys, their states and the login. */
static void print_commands(void)
{
	mlx5_command_fn command =
		(mlx5_command_fn)(uintptr_t)dlsym(RTLD_DEFAULT, "mlx5_command");
	const uint8_t *at;
	uint32_t bytes;

	if (!command)
		die("no stand-in");
	puts("case commands of objects");
	for (unsigned int i = 0; (at = command(i, &bytes)); i++) {
		printf("command %u ", i);
		for (uint32_t j = 0; j < bytes && j < 512; j++)
			printf("%02x", at[j]);
		putchar('\n');
	}
}

void own_start(struct ibv_context *context, struct ibv_pd *pd)
{
	struct mlx5dv_mkey_init_attr attr = {
		.pd = pd,
		.create_flags = MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT,
		.max_entries = 64,
	};
	struct mlx5dv_mkey *(*create)(struct mlx5dv_mkey_init_attr *);
	struct mlx5dv_dek *(*create_dek)(struct ibv_context *,
					 struct mlx5dv_dek_init_attr *);
	struct mlx5dv_dek_init_attr plain = {
		.pd = pd,
		.has_keytag = true,
		.opaque = "opaque",
		.comp_mask = MLX5DV_DEK_INIT_ATTR_CRYPTO_LOGIN,
	};

	create_qp = (__typeof__(create_qp))(uintptr_t)device_function(
		context, "mlx5dv_create_qp");
	extended_part = (__typeof__(extended_part))(uintptr_t)device_function(
		context, "mlx5dv_qp_ex_from_ibv_qp_ex");
	create = (__typeof__(create))(uintptr_t)device_function(context,
								"mlx5dv_create_mkey");
	key = create(&attr);
	if (!key)
		die("mlx5dv_create_mkey: %s", strerror(errno));
	for (unsigned int i = 0; i < 3; i++) {
		static const uint32_t flags[] = {
			MLX5DV_MKEY_INIT_ATTR_FLAGS_BLOCK_SIGNATURE,
			MLX5DV_MKEY_INIT_ATTR_FLAGS_CRYPTO,
			MLX5DV_MKEY_INIT_ATTR_FLAGS_BLOCK_SIGNATURE |
				MLX5DV_MKEY_INIT_ATTR_FLAGS_CRYPTO,
		};

		attr.create_flags = MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT |
				    flags[i];
		protected_keys[i] = create(&attr);
		if (!protected_keys[i])
			die("mlx5dv_create_mkey: %s", strerror(errno));
	}
	check = (__typeof__(check))(uintptr_t)device_function(
		context, "_mlx5dv_mkey_check");
	for (unsigned int i = 0; i < sizeof(plain.key); i++)
		plain.key[i] = i;
	create_dek = (__typeof__(create_dek))(uintptr_t)device_function(
		context, "mlx5dv_dek_create");
	dek = create_dek(context, &plain);
	if (!dek)
		die("mlx5dv_dek_create: %s", strerror(errno));
	log_in(context);
	print_commands();
}

struct ibv_qp *own_queue_pair(struct ibv_context *context, const struct kind *kind,
			      struct ibv_qp_init_attr_ex *attr)
{
	struct mlx5dv_qp_init_attr own = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC,
		.dc_init_attr = { .dc_type = MLX5DV_DCTYPE_DCI },
	};

	if (kind->own) {
		own.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS;
		own.send_ops_flags = MLX5DV_QP_EX_WITH_MR_LIST |
				     MLX5DV_QP_EX_WITH_MR_INTERLEAVED |
				     MLX5DV_QP_EX_WITH_MKEY_CONFIGURE |
				     MLX5DV_QP_EX_WITH_RAW_WQE;
	}
	return create_qp(context, attr, &own);
}

void own_address(struct ibv_qp_ex *qp, const struct request *r)
{
	struct mlx5dv_qp_ex *own = extended_part(qp);

	/* Also in a stream, now and then. */
	if (r->wr_id & 12)
		mlx5dv_wr_set_dc_addr(own, r->ah, r->remote_qpn, r->access_key);
	else
		mlx5dv_wr_set_dc_addr_stream(own, r->ah, r->remote_qpn,
					     r->access_key, r->wr_id >> 48);
}

/* A WQE of up to two blocks: the flags, and the rest any. */
static void raw(struct ibv_qp_ex *qp, const struct request *r)
{
	static const uint8_t opcodes[] = { MLX5_OPCODE_SEND, MLX5_OPCODE_RDMA_WRITE,
					   MLX5_OPCODE_NOP };
	struct numbers numbers = { r->swap };
	uint64_t wqe[16];
	uint8_t segments = 1 + number_in(&numbers, 0, 8);
	struct mlx5_wqe_ctrl_seg *control = (void *)wqe;

	for (unsigned int i = 0; i < 16; i++)
		wqe[i] = next_number(&numbers);
	mlx5dv_set_ctrl_seg(control, 0, opcodes[r->swap % 3], 0, qp->qp_base.qp_num,
			    MLX5_WQE_CTRL_CQ_UPDATE, segments, r->swap >> 8,
			    r->immediate);
	mlx5dv_wr_raw_wqe(extended_part(qp), wqe);
}

static uint64_t any(struct numbers *numbers, uint64_t a, uint64_t b)
{
	return number_in(numbers, 0, 2) ? a : b;
}

struct domain {
	struct mlx5dv_sig_t10dif dif;
	struct mlx5dv_sig_crc crc;
	struct mlx5dv_sig_block_domain domain;
};

/* The same with some probability as `other`, so that parts are copied. */
static struct mlx5dv_sig_block_domain *
make_domain(struct numbers *n, struct domain *to, const struct domain *other)
{
	if (other && number_in(n, 0, 2))
		*to = *other;
	else
		*to = (struct domain){
			.dif = { .bg_type = number_in(n, 0, 2),
				 .bg = any(n, 0, 0xffff),
				 .app_tag = next_number(n),
				 .ref_tag = next_number(n),
				 .flags = number_in(n, 0, 8) },
			.crc = { .type = number_in(n, 0, 3) },
			.domain = { .sig_type = number_in(n, 0, 2),
				    .block_size = number_in(n, 0, 5) },
		};
	to->crc.seed = any(n, 0, to->crc.type == MLX5DV_SIG_CRC_TYPE_CRC64_XP10 ?
					 UINT64_MAX :
					 UINT32_MAX);
	if (!number_in(n, 0, 3))
		to->dif.ref_tag = next_number(n);
	/* Now and then it is refused. */
	if (!number_in(n, 0, 40))
		to->domain.block_size = 7;
	if (to->domain.sig_type == MLX5DV_SIG_TYPE_CRC)
		to->domain.sig.crc = &to->crc;
	else
		to->domain.sig.dif = &to->dif;
	return &to->domain;
}

static void set_signatures(struct mlx5dv_qp_ex *own, struct numbers *n)
{
	struct domain mem, wire;
	unsigned int which = number_in(n, 0, 4);
	struct mlx5dv_sig_block_attr attr = {
		.flags = !number_in(n, 0, 6),
		.check_mask = next_number(n),
		.copy_mask = next_number(n),
	};

	attr.mem = make_domain(n, &mem, NULL);
	attr.wire = make_domain(n, &wire, &mem);
	if (which == 0)
		attr.mem = NULL;
	if (which == 1)
		attr.wire = NULL;
	mlx5dv_wr_set_mkey_sig_block(own, &attr);
}

static void set_encryption(struct mlx5dv_qp_ex *own, struct numbers *n)
{
	struct mlx5dv_crypto_attr attr = {
		.encrypt_on_tx = number_in(n, 0, 2),
		.signature_crypto_order = number_in(n, 0, 2),
		.data_unit_size = number_in(n, 0, 5),
		.dek = dek,
	};

	for (unsigned int i = 0; i < sizeof(attr.initial_tweak); i++)
		attr.initial_tweak[i] = next_number(n);
	for (unsigned int i = 0; i < sizeof(attr.keytag); i++)
		attr.keytag[i] = next_number(n);
	mlx5dv_wr_set_mkey_crypto(own, &attr);
}

/* Of the setters that the key has: some, in any order. */
static void protect(struct ibv_qp_ex *qp, const struct request *r,
		    const struct ibv_sge *sges)
{
	struct numbers n = { r->swap };
	unsigned int which = number_in(&n, 0, 3);
	struct mlx5dv_qp_ex *own = extended_part(qp);
	struct mlx5dv_mkey_conf_attr conf = {
		.conf_flags = number_in(&n, 0, 6) ?
				      0 :
				      MLX5DV_MKEY_CONF_FLAG_RESET_SIG_ATTR,
	};
	/* Rights, layout, signatures, encryption. */
	unsigned int has = which == 0 ? 7 : which == 1 ? 11 : 15;
	unsigned int set = next_number(&n) & has, first = next_number(&n) & 3;

	/* A key without a layout has no length that would fit. */
	set |= 2;
	mlx5dv_wr_mkey_configure(own, protected_keys[which],
				 __builtin_popcount(set), &conf);
	for (unsigned int i = 0; i < 4; i++) {
		unsigned int setter = (first + i) & 3;

		if (!(set & 1u << setter))
			continue;
		if (setter == 0)
			mlx5dv_wr_set_mkey_access_flags(own,
							r->compare_add & 0xf);
		else if (setter == 1)
			mlx5dv_wr_set_mkey_layout_list(own, r->nsges, sges);
		else if (setter == 2)
			set_signatures(own, &n);
		else
			set_encryption(own, &n);
	}
}

int own_recover(struct ibv_qp *queue_pair)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(queue_pair);
	struct mlx5dv_qp_ex *own = extended_part(qp);
	struct mlx5dv_mkey_conf_attr conf = {
		.conf_flags = MLX5DV_MKEY_CONF_FLAG_RESET_SIG_ATTR,
	};
	struct mlx5dv_crypto_attr encryption = {
		.encrypt_on_tx = true,
		.signature_crypto_order =
			MLX5DV_SIGNATURE_CRYPTO_ORDER_SIGNATURE_BEFORE_CRYPTO_ON_TX,
		.dek = dek,
	};
	struct ibv_sge sge = { DATA_AT, 512, 1 };

	ibv_wr_start(qp);
	qp->wr_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
	for (unsigned int i = 0; i < 3; i++) {
		mlx5dv_wr_mkey_configure(own, protected_keys[i], i ? 2 : 1, &conf);
		mlx5dv_wr_set_mkey_layout_list(own, 1, &sge);
		if (i)
			mlx5dv_wr_set_mkey_crypto(own, &encryption);
	}
	return ibv_wr_complete(qp);
}

/* As libmlx5's struct mlx5_sigerr_cqe. */
struct wrong_signature {
	uint8_t reserved[16];
	uint32_t values[4];
	uint16_t syndrome;
	uint8_t type, domain;
	uint32_t mkey;
	uint64_t offset;
	uint8_t rest[15];
	uint8_t op_own;
};
_Static_assert(sizeof(struct wrong_signature) == sizeof(struct mlx5_cqe64), "");

struct mlx5_cqe64 own_wrong_signature(struct numbers *n)
{
	struct wrong_signature wrong = {
		.syndrome = htobe16(1u << number_in(n, 10, 14)),
		.type = !number_in(n, 0, 10),
		.domain = number_in(n, 0, 2),
		.mkey = htobe32(protected_keys[any(n, 0, 2)]->lkey),
		.offset = next_number(n),
		.op_own = MLX5_CQE_SIG_ERR << 4,
	};
	struct mlx5_cqe64 cqe;

	for (unsigned int i = 0; i < 4; i++)
		wrong.values[i] = next_number(n);
	memcpy(&cqe, &wrong, sizeof(cqe));
	return cqe;
}

void own_print_errors(void)
{
	for (unsigned int i = 0; i < 3; i++) {
		struct mlx5dv_mkey_err error = {};
		int failed = check(protected_keys[i], &error, sizeof(error));

		printf("key %u %d type %d", i, failed, error.err_type);
		if (error.err_type)
			printf(" %lx %lx %lx", error.err.sig.actual_value,
			       error.err.sig.expected_value,
			       error.err.sig.offset);
		putchar('\n');
	}
}

void own_operation(struct ibv_qp_ex *qp, const struct request *r)
{
	struct mlx5dv_mr_interleaved parts[MOST_SGES];
	struct mlx5dv_qp_ex *own = extended_part(qp);
	struct mlx5dv_mkey_conf_attr none = {};
	uint32_t access = r->compare_add & 0xf, repeat = 1 + (r->swap & 0xffff);
	struct ibv_sge sges[MOST_SGES];

	/* Of a key; the other operations have their own data. */
	qp->wr_flags |= IBV_SEND_INLINE;
	/* A turn has 16 bits; libmlx5 counts the bytes of a list in an int. */
	for (unsigned int i = 0; i < r->nsges; i++) {
		sges[i] = r->sges[i];
		sges[i].length &= (1u << 27) - 1;
		parts[i] = (struct mlx5dv_mr_interleaved){
			.addr = r->sges[i].addr,
			.bytes_count = 1 + r->sges[i].length % 30000,
			.bytes_skip = r->swap % 30000,
			.lkey = r->sges[i].lkey,
		};
	}
	switch ((unsigned int)r->opcode) {
	case OWN_LIST:
		mlx5dv_wr_mr_list(own, key, access, r->nsges, sges);
		break;
	case OWN_INTERLEAVED:
		mlx5dv_wr_mr_interleaved(own, key, access, repeat, r->nsges, parts);
		break;
	case OWN_CONFIGURE:
		/* The rights, or the layout, or both in either order. */
		mlx5dv_wr_mkey_configure(own, key, r->swap % 3 == 2 ? 2 : 1, &none);
		if (r->swap % 3 != 1 && r->swap & 64)
			mlx5dv_wr_set_mkey_access_flags(own, access);
		if (r->swap % 3 && r->swap & 128)
			mlx5dv_wr_set_mkey_layout_list(own, r->nsges, sges);
		else if (r->swap % 3)
			mlx5dv_wr_set_mkey_layout_interleaved(own, repeat, r->nsges,
							      parts);
		if (r->swap % 3 != 1 && !(r->swap & 64))
			mlx5dv_wr_set_mkey_access_flags(own, access);
		break;
	case OWN_PROTECT:
		protect(qp, r, sges);
		break;
	default:
		raw(qp, r);
	}
}

const char *own_name(unsigned int operation)
{
	switch (operation) {
	case OWN_LIST: return "key-list";
	case OWN_INTERLEAVED: return "key-interleaved";
	case OWN_CONFIGURE: return "key-configure";
	case OWN_PROTECT: return "key-protect";
	default: return "raw";
	}
}

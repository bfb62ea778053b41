use super::*;
use std::path::Path;
use std::process::Command as Run;

/// Compiles a C program that prints the header's values, and compares.
#[test]
fn numbers_and_offsets_match_the_kernel_headers() {
    if !Path::new("/usr/include/linux/ublk_cmd.h").exists() {
        println!("skipped: no linux/ublk_cmd.h (linux-libc-dev 6.0 or later)");
        return;
    }
    let folder = std::env::temp_dir().join(format!("ublk-header-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, program) = (folder.join("t.c"), folder.join("t"));
    std::fs::write(&source, C).unwrap();
    let built = Run::new("cc").arg("-o").arg(&program).arg(&source).output();
    let Ok(built) = built else {
        println!("skipped: no C compiler");
        return;
    };
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let said = String::from_utf8(Run::new(&program).output().unwrap().stdout).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    let theirs: Vec<u64> = said.split_whitespace().map(|n| n.parse().unwrap()).collect();
    let ours = [
        Command::DeviceInfo as u64,
        Command::Add as u64,
        Command::Delete as u64,
        Command::Start as u64,
        Command::Stop as u64,
        Command::SetParameters as u64,
        Command::GetParameters as u64,
        Command::StartRecovery as u64,
        Command::EndRecovery as u64,
        u64::from(FETCH),
        u64::from(COMMIT_AND_FETCH),
        u64::from(ABORT.unsigned_abs()),
        u64::from(MAX_DEPTH),
        USER_RECOVERY,
        USER_RECOVERY_REISSUE,
        u64::from(DEAD),
        u64::from(LIVE),
        u64::from(QUIESCED),
        u64::from(OP_READ),
        u64::from(OP_WRITE),
        u64::from(OP_FLUSH),
        u64::from(OP_DISCARD),
        u64::from(OP_WRITE_ZEROES),
        u64::from(Parameters::BASIC),
        u64::from(Parameters::DISCARD),
        size_of::<ControlCommand>() as u64,
        size_of::<DeviceInfo>() as u64,
        size_of::<IoDescriptor>() as u64,
        size_of::<IoCommand>() as u64,
        offset_of!(DeviceInfo, max_io) as u64,
        offset_of!(DeviceInfo, pid) as u64,
        offset_of!(DeviceInfo, flags) as u64,
        offset_of!(Parameters, attributes) as u64,
        offset_of!(Parameters, logical_shift) as u64,
        offset_of!(Parameters, max_sectors) as u64,
        offset_of!(Parameters, sectors) as u64,
        offset_of!(Parameters, virt_boundary_mask) as u64,
        offset_of!(Parameters, discard_alignment) as u64,
        offset_of!(Parameters, discard_granularity) as u64,
        offset_of!(Parameters, max_write_zeroes_sectors) as u64,
        offset_of!(Parameters, max_discard_segments) as u64,
    ];
    assert_eq!(ours.as_slice(), theirs.as_slice());
}

const C: &str = r#"
#include <stdio.h>
#include <stddef.h>
#include <linux/ublk_cmd.h>
#define P(x) printf("%llu\n", (unsigned long long)(x));
#define O(s, m) P(offsetof(struct s, m))
int main(void) {
  P(UBLK_CMD_GET_DEV_INFO) P(UBLK_CMD_ADD_DEV) P(UBLK_CMD_DEL_DEV) P(UBLK_CMD_START_DEV)
  P(UBLK_CMD_STOP_DEV) P(UBLK_CMD_SET_PARAMS) P(UBLK_CMD_GET_PARAMS)
  P(UBLK_CMD_START_USER_RECOVERY)
  P(UBLK_CMD_END_USER_RECOVERY) P(UBLK_IO_FETCH_REQ) P(UBLK_IO_COMMIT_AND_FETCH_REQ) P(19)
  P(UBLK_MAX_QUEUE_DEPTH) P(UBLK_F_USER_RECOVERY) P(UBLK_F_USER_RECOVERY_REISSUE)
  P(UBLK_S_DEV_DEAD) P(UBLK_S_DEV_LIVE) P(UBLK_S_DEV_QUIESCED) P(UBLK_IO_OP_READ)
  P(UBLK_IO_OP_WRITE) P(UBLK_IO_OP_FLUSH) P(UBLK_IO_OP_DISCARD) P(UBLK_IO_OP_WRITE_ZEROES)
  P(UBLK_PARAM_TYPE_BASIC) P(UBLK_PARAM_TYPE_DISCARD)
  P(sizeof(struct ublksrv_ctrl_cmd)) P(sizeof(struct ublksrv_ctrl_dev_info))
  P(sizeof(struct ublksrv_io_desc)) P(sizeof(struct ublksrv_io_cmd))
  O(ublksrv_ctrl_dev_info, max_io_buf_bytes) O(ublksrv_ctrl_dev_info, ublksrv_pid)
  O(ublksrv_ctrl_dev_info, flags) O(ublk_params, basic.attrs) O(ublk_params, basic.logical_bs_shift)
  O(ublk_params, basic.max_sectors) O(ublk_params, basic.dev_sectors)
  O(ublk_params, basic.virt_boundary_mask) O(ublk_params, discard.discard_alignment)
  O(ublk_params, discard.discard_granularity) O(ublk_params, discard.max_write_zeroes_sectors)
  O(ublk_params, discard.max_discard_segments)
  return 0;
}
"#;

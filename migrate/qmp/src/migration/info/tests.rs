use super::super::read;
use super::*;
use serde_json::json;

#[test]
fn a_reply_of_qemu_7_2_is_read() {
    let reply = json!({
        "expected-downtime": 300, "status": "active", "setup-time": 2, "total-time": 1207,
        "ram": {
            "total": 554500096, "postcopy-requests": 0, "dirty-sync-count": 1,
            "multifd-bytes": 0, "pages-per-second": 27570, "downtime-bytes": 0,
            "page-size": 4096, "remaining": 402046976, "postcopy-bytes": 0, "mbps": 903.2,
            "transferred": 103049113, "dirty-sync-missed-zero-copy": 0,
            "precopy-bytes": 103049113, "duplicate": 12085, "dirty-pages-rate": -1,
            "skipped": 0, "normal-bytes": 102637568, "normal": 25058
        },
        "compression": { "pages": 198, "busy": 3, "busy-rate": 0.5,
            "compressed-size": 41, "compression-rate": 2 }
    });
    let info: MigrationInfo = read("query-migrate", reply).unwrap();
    assert_eq!((info.status(), info.is_over()), ("active", false));
    assert_eq!((info.total_time, info.downtime), (Some(1207), None));
    let ram = info.ram.unwrap();
    assert_eq!((ram.normal, ram.dirty_sync_count), (Some(25058), Some(1)));
    assert_eq!((ram.mbps, ram.dirty_pages_rate), (Some(903.2), None));
}

#[test]
fn an_empty_reply_means_no_migration() {
    let info: MigrationInfo = read("query-migrate", json!({})).unwrap();
    assert_eq!((info.status(), info.is_over()), ("none", false));
    assert_eq!(info, MigrationInfo::default());
}

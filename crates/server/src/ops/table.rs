//! The operations of the wire protocol, and who may use them: the one table of them.

use crate::Tier;

macro_rules! operations {
    ($($variant:ident $name:literal $tier:expr;)*) => {
        /// What a request asks for.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum Operation { $($variant),* }

        impl Operation {
            pub(crate) const ALL: &[Self] = &[$(Self::$variant),*];

            /// The `type` of a request.
            pub(crate) const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// The level that a role needs; none for those that anybody may use, or that have rules of their own.
            pub(crate) const fn tier(self) -> Option<Tier> {
                match self { $(Self::$variant => $tier),* }
            }

            pub(crate) fn named(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

const READ: Option<Tier> = Some(Tier::Read);
const WRITE: Option<Tier> = Some(Tier::Write);
const ADMIN: Option<Tier> = Some(Tier::Admin);

operations! {
    StoreInsert "store.insert" WRITE;
    StoreInsertMany "store.insertMany" WRITE;
    StoreUpsert "store.upsert" WRITE;
    StoreGet "store.get" READ;
    StoreUpdate "store.update" WRITE;
    StoreDelete "store.delete" WRITE;
    StoreAll "store.all" READ;
    StoreWhere "store.where" READ;
    StoreFindOne "store.findOne" READ;
    StoreCount "store.count" READ;
    StoreFirst "store.first" READ;
    StoreLast "store.last" READ;
    StorePaginate "store.paginate" READ;
    StoreSum "store.sum" READ;
    StoreAvg "store.avg" READ;
    StoreMin "store.min" READ;
    StoreMax "store.max" READ;
    StoreClear "store.clear" WRITE;
    StoreBuckets "store.buckets" READ;
    StoreStats "store.stats" READ;
    StoreQuery "store.query" READ;
    StoreSubscribe "store.subscribe" READ;
    StoreUnsubscribe "store.unsubscribe" READ;
    StoreTransaction "store.transaction" WRITE;
    StoreDefineBucket "store.defineBucket" ADMIN;
    StoreDropBucket "store.dropBucket" ADMIN;
    StoreUpdateBucket "store.updateBucket" ADMIN;
    StoreGetBucketSchema "store.getBucketSchema" ADMIN;
    StoreDefineQuery "store.defineQuery" ADMIN;
    StoreUndefineQuery "store.undefineQuery" ADMIN;
    StoreListQueries "store.listQueries" ADMIN;
    RulesEmit "rules.emit" WRITE;
    RulesSetFact "rules.setFact" WRITE;
    RulesGetFact "rules.getFact" READ;
    RulesDeleteFact "rules.deleteFact" WRITE;
    RulesQueryFacts "rules.queryFacts" READ;
    RulesGetAllFacts "rules.getAllFacts" READ;
    RulesSubscribe "rules.subscribe" READ;
    RulesUnsubscribe "rules.unsubscribe" READ;
    RulesStats "rules.stats" READ;
    RulesRegisterRule "rules.registerRule" ADMIN;
    RulesUnregisterRule "rules.unregisterRule" ADMIN;
    RulesUpdateRule "rules.updateRule" ADMIN;
    RulesEnableRule "rules.enableRule" ADMIN;
    RulesDisableRule "rules.disableRule" ADMIN;
    RulesGetRule "rules.getRule" ADMIN;
    RulesGetRules "rules.getRules" ADMIN;
    RulesValidateRule "rules.validateRule" ADMIN;
    AuthLogin "auth.login" None;
    AuthLogout "auth.logout" None;
    AuthWhoami "auth.whoami" None;
    AuditQuery "audit.query" ADMIN;
    ProceduresRegister "procedures.register" ADMIN;
    ProceduresUnregister "procedures.unregister" ADMIN;
    ProceduresUpdate "procedures.update" ADMIN;
    ProceduresGet "procedures.get" READ;
    ProceduresList "procedures.list" ADMIN;
    ProceduresCall "procedures.call" WRITE;
    ServerStats "server.stats" ADMIN;
    ServerConnections "server.connections" ADMIN;
}

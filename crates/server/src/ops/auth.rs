//! Logging in and out.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use serde_json::{Value as Json, json};

use crate::auth::Session;
use crate::ops::handler::Serving;
use crate::protocol::reply::{Data, Outcome};
use crate::session::caller::{Caller, Login};
use crate::{Code, RequestError};

impl Serving {
    /// A login that fails leaves whoever was logged in where they were, unless their sessions are revoked.
    pub(crate) async fn login(&self, token: &str) -> Outcome {
        let Some(auth) = self.core.auth.clone() else {
            return Err(RequestError::new(Code::UnknownOperation, "this server has no logins"));
        };
        let now = self.core.store.now();
        let known = auth.validator.validate(token, now).await.map_err(|error| RequestError::internal(&error))?;
        let Some(session) = known.filter(|session| !session.is_expired(now)) else {
            self.core.counters.logins_failed.fetch_add(1, Relaxed);
            return Err(RequestError::new(Code::Unauthorized, "Invalid or expired token"));
        };
        let told = told(&session);
        let login = Arc::new(Login::new(session, &auth));
        let user = login.session.user_id.clone();
        let is_revoked = || self.core.revocations.is_revoked(&user, now);
        if !is_revoked() {
            self.change(Some(login)).await?;
        }
        // Looked at again when the session is there to be found, so that a revocation either finds it or is found here.
        if is_revoked() {
            self.core.counters.logins_failed.fetch_add(1, Relaxed);
            self.change(None).await?;
            return Err(RequestError::new(Code::SessionRevoked, "the sessions of this user were revoked"));
        }
        Ok(Data::json(&told))
    }

    pub(crate) async fn logout(&self) -> Outcome {
        self.change(None).await?;
        Ok(Data::text("{\"loggedOut\":true}"))
    }

    /// Somebody is logged in in place of whoever was before. Subscriptions are reviewed before that: nobody sees what is not for
    /// them.
    async fn change(&self, login: Option<Arc<Login>>) -> Result<(), RequestError> {
        let is_required = self.core.requires_auth();
        if self.connection.outlet.is_expired(|| self.core.store.now()) {
            // What they may follow would end with the session that is over, when the review shows them their rows.
            self.connection.owe_to(login.as_deref(), is_required);
        }
        self.review(&Caller::new(self.core.auth.clone(), login.clone())).await?;
        self.connection.set_login(login, is_required);
        Ok(())
    }

    pub(crate) fn whoami(&self) -> Json {
        let now = self.core.store.now();
        let Some(login) = self.connection.login().filter(|login| !login.session.is_expired(now)) else {
            return json!({"authenticated": false});
        };
        let mut whoami = json!({"authenticated": true});
        if let (Some(members), Json::Object(told)) = (whoami.as_object_mut(), told(&login.session)) {
            members.extend(told);
        }
        whoami
    }
}

/// What somebody is told about themselves.
fn told(session: &Session) -> Json {
    json!({"userId": session.user_id, "roles": session.roles, "expiresAt": session.expires_at})
}

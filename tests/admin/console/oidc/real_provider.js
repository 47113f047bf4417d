// A certified OpenID provider (npm oidc-provider) on loopback for tests: node real_provider.js PORT CALLBACK_URL
// Its development pages accept any password; a name such as person+group sets the person and the group.
const { Provider } = require('oidc-provider');
const [port, callback] = process.argv.slice(2);
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [{
    client_id: 'loramux', client_secret: 'a-client-secret-of-some-length', redirect_uris: [callback],
    grant_types: ['authorization_code'], response_types: ['code'],
  }],
  claims: { openid: ['sub'], profile: ['name', 'groups'], email: ['email'] },
  pkce: { required: () => true, methods: ['S256'] },
  findAccount: (_, id) => ({
    accountId: id,
    claims: () => ({ sub: id, name: id.split('+')[0], groups: [id.split('+')[1] || 'nobody', 'everybody'] }),
  }),
});
provider.listen(Number(port), '127.0.0.1', () => console.log('listening'));
